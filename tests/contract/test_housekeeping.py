"""Housekeeping's own passes over a journal: what has had its time goes, however much there is, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.clock import HandClock
from harness.journal import Bench, done, new_sampler, submission
from twinkle.core.errors import ConfigError, StorageUnavailable
from twinkle.core.lease import Lease
from twinkle.core.operation import OperationKind, OperationState, Outcome, Payload
from twinkle.core.settings import Settings, environment_of, load_settings
from twinkle.scheduler.channels import CompletionPublisher
from twinkle.storage.adapters.snapshots import Snapshot
from twinkle.storage.blobs import FolderStore
from twinkle.storage.sampling.ephemeral import NewEphemeralWeights
from twinkle.tasks.app import make_app
from twinkle.tasks.housekeeping import Housekeeping
from twinkle.tasks.jobs import JobDispatcher
from twinkle.tasks.nudge import Nudger
from twinkle.tasks.pushing import CheckpointPusher

HOUR_S = 3600.0


@pytest.fixture
def blobs(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "objects")


@pytest.fixture
def housekeeping(bench: Bench, clock: HandClock, blobs: FolderStore, redis_url: str) -> Housekeeping:
    settings = Settings.model_validate(
        {"redis_url": redis_url, "operation_deadline_s_of": {"sample": 60.0}, "retention_s": 48 * HOUR_S}
    )
    app = make_app(settings)
    return Housekeeping(
        settings=settings,
        stores=bench.stores,
        blobs=blobs,
        nudger=Nudger(app, redis_url),
        publisher=CompletionPublisher(redis_url),
        jobs=JobDispatcher(app, bench.stores.waiting_jobs, redis_url),
        pusher=CheckpointPusher(bench.stores.pushes, bench.stores.jobs),
    )


def test_one_pass_forgets_every_old_result_however_many_there_are(
    bench: Bench, lease: Lease, clock: HandClock, housekeeping: Housekeeping
) -> None:
    bench.journal.open_lane(new_sampler("s"))
    bench.append(*(submission("s", seq, OperationKind.SAMPLE) for seq in range(1200)))
    while claims := bench.claim_samples(lease, 400):
        bench.journal.commit(lease, [done(claim) for claim in claims])
    clock.move(24 * HOUR_S)

    housekeeping.expire()

    gone = bench.rows("SELECT COUNT(*) FROM operation WHERE expired AND payload IS NULL AND result IS NULL")
    assert gone == [(1200,)]


def test_blobs_go_in_a_later_pass_and_rows_and_younger_ones_stay(
    bench: Bench, lease: Lease, clock: HandClock, blobs: FolderStore, housekeeping: Housekeeping
) -> None:
    bench.created(lease, "a")
    for key in ("results/old", "snapshots/old", "snapshots/new"):
        blobs.put(key, b"x")
    bench.append(submission("a", 1))
    (claim,) = bench.claim(lease)
    outcome = Outcome(request_id=claim.request_id, lane="a", seq=1, kind=claim.kind, result=Payload(blob="results/old"))
    bench.journal.commit(lease, [outcome])
    for seq, name in ((0, "old"), (1, "new")):
        created_at = clock.now() + seq
        bench.snapshots.add(
            Snapshot(adapter="a", seq=seq, blob=f"snapshots/{name}", size_bytes=1, created_at=created_at)
        )
    clock.move(49 * HOUR_S)

    housekeeping.expire()
    at_once = [key for key in ("results/old", "snapshots/old") if blobs.size_bytes(key)]
    clock.move(HOUR_S)
    housekeeping.expire()

    assert at_once == ["results/old", "snapshots/old"]
    for key in at_once:
        with pytest.raises(KeyError):
            blobs.get(key)
    assert blobs.get("snapshots/new") == b"x"
    assert bench.rows("SELECT payload, payload_bytes > 0 FROM operation WHERE seq = 1") in ([(None, True)], [(None, 1)])
    assert bench.rows("SELECT key FROM doomed_blob") == []


def test_a_sweep_ends_each_kind_at_its_own_deadline(
    bench: Bench, lease: Lease, clock: HandClock, housekeeping: Housekeeping
) -> None:
    bench.created(lease, "a")
    bench.journal.open_lane(new_sampler("s"))
    bench.append(submission("a", 1), submission("s", 0, OperationKind.SAMPLE))
    clock.move(60)

    housekeeping.sweep()

    assert bench.status("s", 0).state is OperationState.FAILED
    assert bench.status("a", 1).state is OperationState.QUEUED


def _stumbles(*_: object, **__: object) -> None:
    raise RuntimeError("over one row")


def test_what_one_sweep_stumbles_over_keeps_no_other(
    bench: Bench, lease: Lease, clock: HandClock, housekeeping: Housekeeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.journal.open_lane(new_sampler("s"))
    bench.append(*(submission("s", seq, OperationKind.SAMPLE) for seq in range(2)))
    (claim,) = bench.claim_samples(lease, 1)
    bench.journal.commit(lease, [done(claim)])
    monkeypatch.setattr(bench.stores.moves, "finish_abandoned", _stumbles)
    monkeypatch.setattr(bench.stores.kept_payloads, "count", _stumbles)
    clock.move(24 * HOUR_S)

    with pytest.raises(ExceptionGroup) as in_sweep:
        housekeeping.sweep()
    with pytest.raises(ExceptionGroup) as in_expire:
        housekeeping.expire()

    assert [len(group.value.exceptions) for group in (in_sweep, in_expire)] == [1, 1]
    assert bench.status("s", 1).state is OperationState.FAILED
    assert bench.rows("SELECT seq FROM operation WHERE expired") == [(0,)]


def test_what_went_wrong_before_the_database_went_away_is_told_with_it_and_the_rest_is_left(
    bench: Bench, lease: Lease, clock: HandClock, housekeeping: Housekeeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_away(*_: object, **__: object) -> None:
        raise StorageUnavailable("away")

    bench.journal.open_lane(new_sampler("s"))
    bench.append(submission("s", 0, OperationKind.SAMPLE))
    monkeypatch.setattr(bench.stores.moves, "finish_abandoned", is_away)
    clock.move(60)

    with pytest.raises(StorageUnavailable):
        housekeeping.sweep()
    monkeypatch.setattr(bench.stores.upkeep, "close_gaps", _stumbles)
    with pytest.raises(ExceptionGroup) as told:
        housekeeping.sweep()

    assert [type(error) for error in told.value.exceptions] == [RuntimeError, StorageUnavailable]
    assert bench.status("s", 0).state is OperationState.QUEUED


def test_a_store_that_goes_away_among_the_prunings_ends_the_pass_and_each_error_is_told_once(
    bench: Bench, housekeeping: Housekeeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def prune(run: str, *_: object) -> None:
        tried.append(run)
        if run == "b":
            raise RuntimeError("over one row")
        if run == "c":
            raise StorageUnavailable("away")

    monkeypatch.setattr(bench.stores.snapshots, "runs_to_prune", lambda **_: list("abcd"))
    monkeypatch.setattr(bench.stores.snapshots, "prune", prune)
    monkeypatch.setattr(bench.stores.audit, "forget", lambda **_: tried.append("forgotten"))

    with pytest.raises(ExceptionGroup) as told:
        housekeeping.expire()

    assert [type(error) for error in told.value.exceptions] == [RuntimeError, StorageUnavailable]
    assert tried == ["a", "b", "c"]


def test_deadlines_by_kind_reach_a_child_process_as_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_OPERATION_DEADLINE_S_OF", '{"sample": 600, "save_weights": 60.5}')

    variables = environment_of(load_settings())
    monkeypatch.setenv("TWINKLE_OPERATION_DEADLINE_S_OF", variables["TWINKLE_OPERATION_DEADLINE_S_OF"])

    assert load_settings().operation_deadline_s_of == {OperationKind.SAMPLE: 600, OperationKind.SAVE_WEIGHTS: 60.5}
    monkeypatch.setenv("TWINKLE_OPERATION_DEADLINE_S_OF", '{"samples": 600}')
    with pytest.raises(ConfigError, match="OPERATION_DEADLINE_S_OF"):
        load_settings()


def test_weights_without_a_name_end_a_grace_after_their_clients_session_has_lapsed(
    bench: Bench, lease: Lease, clock: HandClock, housekeeping: Housekeeping
) -> None:
    bench.created(lease, "a")
    weights = NewEphemeralWeights(adapter="a", seq=0, size_bytes=1, opened_at=clock.now(), expires_at=None, max_open=1)
    bench.journal.open_lane(replace(new_sampler("nameless"), weights=weights))
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE session SET heartbeat_at = ? WHERE id = 'session-t0'", (clock.now(),))

    def reason() -> str | None:
        found = bench.sampling_sessions.find("nameless").weights
        assert found is not None
        return found.end_reason

    clock.move(300 + 3600 - 1)
    housekeeping.expire()
    before = reason()
    clock.move(1)
    housekeeping.expire()

    assert before is None
    assert reason() == "its client's session had not been heard of for 3900 s"
