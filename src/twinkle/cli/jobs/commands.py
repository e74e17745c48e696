"""``twinkle jobs``: what was handed over, how it goes, and what is to become of it. Asks the server, as its tenant."""

from __future__ import annotations

from typing import Annotated

import typer

from twinkle.cli.flags import JsonFlag
from twinkle.cli.jobs.options import ServerFlag

jobs = typer.Typer(
    help="Jobs: how they go, and what is to become of them.", no_args_is_help=True, rich_markup_mode=None
)

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
JobsArgument = Annotated[list[str], typer.Argument(metavar="JOB...", help="The jobs' ids.")]


@jobs.command("list")
def jobs_list(
    limit: Annotated[int, typer.Option(min=1, help="How many of the newest.")] = 20,
    kind: Annotated[list[str] | None, typer.Option(help="Of this kind; may be repeated.")] = None,
    state: Annotated[list[str] | None, typer.Option(help="In this state; may be repeated.")] = None,
    parent: Annotated[str | None, typer.Option(metavar="JOB", help="Members of this sweep or flow.")] = None,
    server: ServerFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """List the newest jobs.

    twinkle jobs list --state running --state queued
    """
    from twinkle.cli.jobs.calls import list_jobs

    list_jobs(server, limit=limit, kinds=kind or [], states=state or [], parent=parent, as_json=as_json)


@jobs.command("show")
def jobs_show(job: JobArgument, server: ServerFlag = None, as_json: JsonFlag = False) -> None:
    """Show one job: how it stands, what it was asked for, the attempts at it.

    twinkle jobs show job-0b1c...
    """
    from twinkle.cli.jobs.calls import show_job

    show_job(server, job, as_json=as_json)


@jobs.command("logs")
def jobs_logs(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until its end; the exit code is its own.")] = False,
    after: Annotated[int, typer.Option(min=0, help="Only what came behind the event of this number.")] = 0,
    server: ServerFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON document a line.")] = False,
) -> None:
    """Show what happened in a job. Ctrl-C stops looking, not the job.

    twinkle jobs logs -f job-0b1c...
    """
    from twinkle.cli.jobs.calls import show_logs

    raise SystemExit(show_logs(server, job, follow=follow, after=after, as_json=as_json))


@jobs.command("wait")
def jobs_wait(
    job: JobArgument,
    timeout_s: Annotated[float | None, typer.Option("--timeout", min=0, help="Seconds.  [default: no end]")] = None,
    server: ServerFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Wait until a job has ended; the exit code is its own, or 75 when the time is up.

    twinkle jobs wait job-0b1c... --timeout 3600
    """
    from twinkle.cli.jobs.calls import wait_for_job

    raise SystemExit(wait_for_job(server, job, timeout_s=timeout_s, as_json=as_json))


@jobs.command("cancel")
def jobs_cancel(job: JobsArgument, server: ServerFlag = None, as_json: JsonFlag = False) -> None:
    """End jobs. A training leaves a checkpoint, a batch what it has.

    twinkle jobs cancel job-0b1c...
    """
    from twinkle.cli.jobs.calls import tell_jobs

    tell_jobs(server, "cancel", job, as_json=as_json)


@jobs.command("pause")
def jobs_pause(job: JobsArgument, server: ServerFlag = None, as_json: JsonFlag = False) -> None:
    """Hold jobs at their next safe point.

    twinkle jobs pause job-0b1c...
    """
    from twinkle.cli.jobs.calls import tell_jobs

    tell_jobs(server, "pause", job, as_json=as_json)


@jobs.command("resume")
def jobs_resume(job: JobsArgument, server: ServerFlag = None, as_json: JsonFlag = False) -> None:
    """Let paused jobs go on where they were.

    twinkle jobs resume job-0b1c...
    """
    from twinkle.cli.jobs.calls import tell_jobs

    tell_jobs(server, "resume", job, as_json=as_json)


@jobs.command("retry")
def jobs_retry(job: JobsArgument, server: ServerFlag = None, as_json: JsonFlag = False) -> None:
    """Give jobs that failed or were cancelled another attempt, from what they had saved.

    twinkle jobs retry job-0b1c...
    """
    from twinkle.cli.jobs.calls import tell_jobs

    tell_jobs(server, "retry", job, as_json=as_json)


@jobs.command("webhook-secret")
def jobs_webhook_secret(server: ServerFlag = None, as_json: JsonFlag = False) -> None:
    """Show what the signatures of your webhooks are checked with.

    twinkle jobs webhook-secret
    """
    from twinkle.cli.jobs.calls import show_webhook_secret

    show_webhook_secret(server, as_json=as_json)
