"""How a command ends when it cannot do what it was asked."""

from __future__ import annotations

EXIT_FOUND = 1
"""What was looked for is there, and should not be: rows of a data set that cannot be trained on."""

EXIT_ERROR = 2
"""Something is wrong that trying again does not mend."""

EXIT_TRY_AGAIN = 75
"""Something did not answer (``EX_TEMPFAIL`` of sysexits.h)."""

EXIT_JOB_FAILED = 1
"""The job that was waited for has failed. A script's own exit code takes its place."""

EXIT_JOB_CANCELLED = 3
"""The job that was waited for was cancelled."""

EXIT_INTERRUPTED = 130
"""Ctrl-C, as shells have it; a job that was looked at goes on."""
