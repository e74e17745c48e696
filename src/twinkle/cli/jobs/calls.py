"""What ``twinkle jobs`` asks the server, and how it shows the answers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from twinkle.cli.console import say
from twinkle.cli.exit_codes import EXIT_TRY_AGAIN
from twinkle.cli.jobs.following import (
    Follower,
    duration,
    ending_words,
    event_line,
    exit_code_of,
    json_line,
    progress_words,
)
from twinkle.cli.jobs.members import FLOW, SWEEP, print_members
from twinkle.cli.jobs.submitting import detached
from twinkle.cli.table import minute_of, print_table
from twinkle.client import Client, Job
from twinkle.wire.bodies.base import ResponseBody
from twinkle.wire.bodies.jobs import JobResponse, JobStanding

_PAGE = 200
_VERBS = {"cancel": Job.cancel, "pause": Job.pause, "resume": Job.resume, "retry": Job.retry}


def list_jobs(
    server: str | None, *, limit: int, kinds: Sequence[str], states: Sequence[str], parent: str | None, as_json: bool
) -> None:
    """Print the newest jobs, of some kinds, in some states, members of one."""
    found: list[JobStanding] = []
    cursor: str | None = None
    with Client(server) as client:
        while len(found) < limit:
            page = client.jobs.page(
                limit=min(limit - len(found), _PAGE), cursor=cursor, kinds=kinds, states=states, parent=parent
            )
            found += page.jobs
            cursor = page.cursor
            if cursor is None:
                break
    if as_json:
        say(json.dumps([job.model_dump(mode="json") for job in found]))
        return
    print_table(("job", "kind", "name", "state", "progress", "submitted", "took"), [_row(job) for job in found])


def show_job(server: str | None, job_id: str, *, as_json: bool) -> None:
    """Print one job."""
    with Client(server) as client:
        attached = client.jobs.attach(job_id)
        job = attached.show()
        members = attached.members() if job.kind in (SWEEP, FLOW) else None
    if as_json:
        told = {} if members is None else members.model_dump(mode="json")
        say(json.dumps({**job.model_dump(mode="json"), **told}))
        return
    say(f"{job.id}: {job.kind}{f', {job.name}' if job.name else ''}, {_state(job)}")
    say(f"submitted {minute_of(job.created_at)}{f' as {job.client_id}' if job.client_id else ''}")
    if job.is_final:
        say(ending_words(job))
    elif words := progress_words(job):
        say(words)
    for words in waiting_words(job):
        say(words)
    if members is not None:
        print_members(members)
    say(f"spec: {json.dumps(job.spec)}")
    if job.attempts:
        rows = [
            (str(one.attempt), minute_of(one.started_at), one.outcome or "running", one.reason or "")
            for one in job.attempts
        ]
        print_table(("attempt", "began", "outcome", "reason"), rows)


def waiting_words(job: JobResponse) -> list[str]:
    """Why a job does not run yet, and when it may have ended."""
    waits, words = job.waits, []
    if waits is not None:
        own = f"{'' if waits.is_exact else 'at least '}{waits.num_own_before}"
        before = f"{'' if waits.is_exact else 'at least '}{waits.num_before}"
        facts = {
            "dependency": f"for {waits.waits_for}" if waits.waits_for else "",
            "at_once": "as many members of its sweep run as may",
            "max_running_jobs": f"as many of your jobs run as may; {own} of yours are before it",
            "retry_backoff": "" if waits.until is None else f"until {minute_of(waits.until)}",
            "position": f"behind {before} jobs, {own} of them yours",
        }
        words.append(f"waits: {waits.reason} {facts.get(waits.reason, '')}".rstrip())
    if job.ends_at is not None:
        words.append(f"may end at {minute_of(job.ends_at)}, by what jobs of its kind took lately")
    return words


def show_logs(server: str | None, job_id: str, *, follow: bool, after: int, as_json: bool) -> int:
    """Print what happened, and if asked what happens until the job has ended; the exit code to end with."""
    job: Job | None = None
    try:
        with Client(server) as client:
            job = client.jobs.attach(job_id)
            if follow:
                return exit_code_of(Follower(job, as_json=as_json, after=after).run())
            while events := job.news(after=after).events:
                for event in events:
                    say(json_line("event", event) if as_json else event_line(event))
                after = events[-1].number
            return 0
    except KeyboardInterrupt:
        return detached(job, as_json=as_json)


def wait_for_job(server: str | None, job_id: str, *, timeout_s: float | None, as_json: bool) -> int:
    """Wait for a job's end and print it; the exit code to end with."""
    job: Job | None = None
    try:
        with Client(server) as client:
            job = client.jobs.attach(job_id)
            ended = job.wait(timeout_s)
    except KeyboardInterrupt:
        return detached(job, as_json=as_json)
    except TimeoutError:
        say(f"{job_id} goes on: it has not ended within {timeout_s:g} s")
        return EXIT_TRY_AGAIN
    say(document(ended) if as_json else ending_words(ended))
    return exit_code_of(ended)


def tell_jobs(server: str | None, verb: str, job_ids: Sequence[str], *, as_json: bool) -> None:
    """Tell jobs what is to become of them; the first that cannot be told ends it with its reason."""
    told: list[JobResponse] = []
    with Client(server) as client:
        for job_id in job_ids:
            job = _VERBS[verb](client.jobs.attach(job_id))
            told.append(job)
            if not as_json:
                say(f"{job.id}: {_state(job)}")
    if as_json:
        say(json.dumps([job.model_dump(mode="json") for job in told]))


def show_webhook_secret(server: str | None, *, as_json: bool) -> None:
    """Print it, alone on its line."""
    with Client(server) as client:
        secret = client.jobs.webhook_secret()
    say(json.dumps({"secret": secret}) if as_json else secret)


def document(body: ResponseBody) -> str:
    """A body as one JSON document, with everything that is null."""
    return json.dumps(body.model_dump(mode="json"))


def _state(job: JobResponse) -> str:
    asked = "cancelling" if job.cancel_requested else "pausing" if job.pause_requested else ""
    return f"{job.state}, {asked}" if asked and not job.is_final else job.state


def _row(job: JobStanding) -> tuple[str, ...]:
    end = job.finished_at
    return (
        job.id,
        job.kind,
        job.name or job.client_id or "",
        job.state,
        progress_words(job),
        minute_of(job.created_at),
        duration(end - job.created_at) if end is not None else "",
    )
