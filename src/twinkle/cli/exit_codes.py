"""How a command ends when it cannot do what it was asked."""

from __future__ import annotations

EXIT_ERROR = 2
"""Something is wrong that trying again does not mend."""

EXIT_TRY_AGAIN = 75
"""Something did not answer (``EX_TEMPFAIL`` of sysexits.h)."""
