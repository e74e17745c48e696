"""``twinkle export``: an export that is waited for, and brought to this machine if that is where it is to be."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.cli.console import say
from twinkle.cli.exit_codes import EXIT_INTERRUPTED
from twinkle.cli.files.downloading import Download, download
from twinkle.cli.jobs.export import export_spec
from twinkle.cli.jobs.following import Follower, exit_code_of, json_line
from twinkle.cli.jobs.submitting import detached
from twinkle.client import Client, Job
from twinkle.client.endpoint import find_endpoint
from twinkle.core.errors import ConfigError

_JOB = "job-"


@dataclass(frozen=True, kw_only=True)
class Export:
    """What the command line says.

    Args:
        what: A checkpoint's path, or the id of a job that exports or has exported.
        forms: In which forms.
        to: A folder of this machine, or an address.
    """

    what: str
    forms: list[str]
    to: str
    is_public: bool
    own_key: bool
    title: str | None
    verify: str | None
    client_id: str | None
    server: str | None
    as_json: bool

    @property
    def is_brought_here(self) -> bool:
        """Whether it is to lie on this machine."""
        return "://" not in self.to


def run_export(export: Export) -> int:
    """Export and wait; the exit code. Ctrl-C leaves the job running; the same command on its id goes on."""
    job: Job | None = None
    try:
        with Client(export.server) as client:
            job = client.jobs.attach(export.what) if export.what.startswith(_JOB) else _submitted(client, export)
            say(json_line("job", job.show()) if export.as_json else f"export {job.id}")
            ended = Follower(job, as_json=export.as_json).run()
        code = exit_code_of(ended)
        if code == 0 and export.is_brought_here:
            _bring(export, job.id, (ended.result or {}).get("files") or [])
        return code
    except KeyboardInterrupt:
        if job is None or export.is_brought_here is False:
            return detached(job, as_json=export.as_json)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        say(f"\ninterrupted; go on with: twinkle export {job.id} --to {export.to}")
        return EXIT_INTERRUPTED


def _submitted(client: Client, export: Export) -> Job:
    spec = export_spec(
        export.what,
        export.forms or ["peft"],
        None if export.is_brought_here else export.to,
        is_public=export.is_public,
        own_key=export.own_key,
        title=export.title,
        verify=export.verify,
    )
    given = {name: value for name, value in spec.items() if value is not None}
    return client.jobs.submit("export", given, client_id=export.client_id)


def _bring(export: Export, job_id: str, files: list[dict[str, Any]]) -> None:
    """Download what is not here yet.

    Raises:
        ConfigError: The job has kept nothing to download.
    """
    kept = [told for told in files if told.get("file")]
    if not kept:
        raise ConfigError(f"{job_id} has kept no files to download: it was sent elsewhere")
    endpoint = find_endpoint(export.server)
    folder = Path(export.to)
    for told in kept:
        wanted = Download(file=told["file"], path=told["path"], size_bytes=told["size_bytes"], sha256=told["sha256"])
        came = download(endpoint, wanted, folder)
        if not export.as_json:
            say(f"{'downloaded' if came else 'already here'}: {folder / wanted.path} ({wanted.size_bytes:,} bytes)")
