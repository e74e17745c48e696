"""From a command's options to a job: files are uploaded, it is handed over and followed until its end or Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from twinkle.cli.console import say
from twinkle.cli.exit_codes import EXIT_INTERRUPTED
from twinkle.cli.files.calls import Progress
from twinkle.cli.jobs.flow import flow_jobs, read_flow
from twinkle.cli.jobs.following import Follower, exit_code_of, json_line
from twinkle.cli.jobs.members import FLOW, SWEEP, print_members
from twinkle.cli.jobs.options import LocalFile, Shared
from twinkle.cli.jobs.sweep import is_sweep, sweep_spec
from twinkle.client import Client, Job
from twinkle.core.errors import ConfigError
from twinkle.wire.bodies.jobs import AfterJob, JobStanding

_ANY = "any:"
_OUTPUTS = ("output_file_id", "results")
"""What results call the file that is wanted of a job."""


def submit_job(kind: str, spec: Mapping[str, object], shared: Shared) -> int:
    """Hand a job, or a sweep of it, over and follow it; the exit code is its own, or 0 where nobody waits for it."""
    if not is_sweep(shared):
        return _submit(kind, spec, shared)
    return _submit(SWEEP, sweep_spec(kind, spec, shared), shared)


def submit_flow(path: Path, shared: Shared) -> int:
    """Hand over what a file says, and follow it; what the command line says goes before what the file says."""
    flow = read_flow(path)
    own = replace(
        shared,
        client_id=shared.client_id or flow.id,
        name=shared.name or flow.name or path.stem,
        notify=shared.notify or flow.notify_url,
        metadata=[f"{key}={value}" for key, value in (flow.metadata or {}).items()] + (shared.metadata or []),
    )
    return _submit(FLOW, {"jobs": flow_jobs(flow)}, own)


def _submit(kind: str, spec: Mapping[str, object], shared: Shared) -> int:
    job: Job | None = None
    try:
        with Client(shared.server) as client:
            job = client.jobs.submit(
                kind,
                {name: _uploaded(value, client) for name, value in spec.items()},
                client_id=shared.client_id,
                name=shared.name,
                after=[dependency_of(text) for text in shared.after or []],
                priority=shared.priority,
                max_attempts=shared.max_attempts,
                notify_url=shared.notify,
                metadata=_metadata(shared.metadata or []),
                dry_run=shared.dry_run,
            )
            say(json_line("job", job.show()) if shared.as_json else f"submitted {job.id}")
            if shared.detach:
                return 0
            ended = Follower(job, as_json=shared.as_json).run()
            if ended.kind in (SWEEP, FLOW) and not shared.as_json:
                print_members(job.members())
            if shared.output is not None:
                _fetch(client, ended, shared.output, as_json=shared.as_json)
            return exit_code_of(ended)
    except KeyboardInterrupt:
        return detached(job, as_json=shared.as_json)


def _fetch(client: Client, ended: JobStanding, path: Path, *, as_json: bool) -> None:
    """Bring the file that came of a job here; one that ended badly may have made a part of it."""
    made = ended.result or (ended.failure.details if ended.failure is not None else None) or {}
    file_id = next((made[name] for name in _OUTPUTS if made.get(name)), None)
    if file_id is None:
        raise ConfigError(f"--output {path}: no file came of {ended.id}; twinkle jobs show {ended.id} says what did")
    client.files.download(file_id, path)
    if not as_json:
        say(f"wrote {path}")


def detached(job: Job | None, *, as_json: bool) -> int:
    """What Ctrl-C means: the job goes on without whoever looked at it. Pressed again, it changes nothing."""
    # Nothing is left to wait for, and in the middle of an interpreter's end it would be told as a death by a signal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if job is None:
        say("interrupted before the job was accepted; submit it again (with the same --id it is one job)")
    elif not as_json:
        say(f"\ndetached; {job.id} goes on.  watch: twinkle jobs logs -f {job.id}  end: twinkle jobs cancel {job.id}")
    return EXIT_INTERRUPTED


def dependency_of(text: str) -> AfterJob:
    """What ``--after`` says."""
    if text.startswith(_ANY):
        return AfterJob(job=text.removeprefix(_ANY), condition="any")
    return AfterJob(job=text)


def _uploaded(value: object, client: Client) -> object:
    """A spec with the ids of files in the place of those of this machine, which are brought to the server."""
    if isinstance(value, LocalFile):
        progress = Progress(value.path.name)
        return client.files.upload(value.path, purpose=value.purpose, progress=progress).id
    if isinstance(value, dict):
        return {name: _uploaded(inner, client) for name, inner in value.items()}
    if isinstance(value, list):
        return [_uploaded(inner, client) for inner in value]
    return value


def _metadata(pairs: list[str]) -> dict[str, str]:
    values = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"--metadata {pair}: write KEY=VALUE")
        values[key] = value
    return values
