"""A name that comes to mean something else: what was bound to the old content never reads the new one."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from harness.clock import HandClock
from harness.journal import Bench, digest, new_sampler
from harness.operations import optim_step, sample_body, save, save_for_sampler, submit_run
from harness.worker import Killed, MakeWorker, WorkerRig
from twinkle.core.adapter import CheckpointKind
from twinkle.core.errors import Conflict, NotFound
from twinkle.core.operation import FailureCategory, OperationKind, Payload, Submission
from twinkle.storage.blobs import BlobStore
from twinkle.storage.checkpoints.checkpoints import NewCopy
from twinkle.storage.journal.records import Records
from twinkle.workers.adapters.artifacts import Artifacts, CheckpointToSave
from twinkle.workers.engines.null_engine import NullState

PATH = "tinker://a/weights/x"


class Owner:
    """Tenant ``t0``, whose run ``a`` has saved and published a checkpoint ``x``.

    Later saves go past the worker, which gets to what waits when a test says so.
    """

    def __init__(self, bench: Bench, worker: WorkerRig, store: BlobStore) -> None:
        self._bench = bench
        self._transfers = worker.transfers
        self._artifacts = Artifacts(
            engine=worker.engine, stores=bench.stores, blobs=store, clock=bench.clock, transfers=worker.transfers
        )
        self._seq = 2
        submit_run(bench, optim_step(), save("x"), adapter="a")
        worker.drain()
        self._state = worker.state_before("a", 3)
        self.publish()

    def publish(self) -> None:
        self._bench.checkpoints.set_public("t0", PATH, public=True)

    def unpublish(self) -> None:
        self._bench.checkpoints.set_public("t0", PATH, public=False)

    def delete(self) -> None:
        self._bench.checkpoints.delete("t0", PATH)

    def save(self, *, changed: bool, overwrite: bool = False) -> None:
        self._seq += 1
        if changed:
            self._state = NullState(applied=f"state {self._seq}", steps=self._seq)
        save = CheckpointToSave(kind=CheckpointKind.TRAINING, name="x", overwrite=overwrite)
        saved = self._transfers.at_once(self._artifacts.save(self._state, save, adapter="a", seq=self._seq))
        with self._bench.database.transaction() as transaction:
            Records(checkpoints=[saved]).insert(transaction, self._bench.clock.now())

    def unpublish_and_publish_again(self) -> None:
        self.unpublish()
        self.publish()

    def delete_and_save_again(self) -> None:
        self.delete()
        self.save(changed=True)

    def delete_save_and_publish_again(self) -> None:
        self.delete_and_save_again()
        self.publish()

    def delete_and_save_the_same_again(self) -> None:
        self.delete()
        self.save(changed=False)
        self.publish()

    def overwrite(self) -> None:
        self.save(changed=True, overwrite=True)

    def overwrite_and_publish_again(self) -> None:
        self.overwrite()
        self.publish()

    def let_it_expire_and_save_again(self) -> None:
        self._bench.checkpoints.set_expiry("t0", PATH, self._bench.clock.now() + 1)
        self._bench.clock.move(1)
        self.save(changed=True)
        self.publish()


ENDS: list[Callable[[Owner], None]] = [
    Owner.unpublish,
    Owner.unpublish_and_publish_again,
    Owner.delete,
    Owner.delete_and_save_again,
    Owner.delete_save_and_publish_again,
    Owner.delete_and_save_the_same_again,
    Owner.overwrite,
    Owner.overwrite_and_publish_again,
    Owner.let_it_expire_and_save_again,
]
for_each_end = pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
for_each_new_content = pytest.mark.parametrize(
    "end", [end for end in ENDS if "unpublish" not in end.__name__], ids=lambda end: end.__name__
)


@pytest.fixture
def worker(make_worker: MakeWorker) -> WorkerRig:
    return make_worker(lease_s=1e6)


@pytest.fixture
def owner(bench: Bench, worker: WorkerRig, store: BlobStore) -> Owner:
    return Owner(bench, worker, store)


def _open(bench: Bench, session: str, *, tenant: str) -> None:
    bench.journal.open_lane(new_sampler(session, tenant=tenant, checkpoint=bench.checkpoints.find(PATH, tenant=tenant)))


def _ask(bench: Bench, session: str, seq: int, *, tenant: str) -> None:
    payload = Payload(inline=sample_body(session, seq))
    bench.append(
        Submission(tenant=tenant, lane=session, seq=seq, kind=OperationKind.SAMPLE, digest="d", payload=payload)
    )


def _failure(bench: Bench, lane: str, seq: int) -> str | None:
    status = bench.status(lane, seq)
    assert status.state.is_final
    if status.failure is None:
        return None
    assert status.failure.category is FailureCategory.USER
    return status.failure.message


@for_each_end
def test_a_strangers_session_ends_with_the_content_it_was_opened_on(
    bench: Bench, worker: WorkerRig, owner: Owner, end: Callable[[Owner], None]
) -> None:
    _open(bench, "s", tenant="t1")
    _ask(bench, "s", 0, tenant="t1")
    worker.drain()
    _ask(bench, "s", 1, tenant="t1")

    end(owner)
    _ask(bench, "s", 2, tenant="t1")
    worker.drain()

    assert _failure(bench, "s", 0) is None
    for seq in (1, 2):
        message = _failure(bench, "s", seq)
        assert message is not None and PATH in message and "not there any more" in message


def test_a_strangers_session_goes_on_while_the_same_content_is_saved_again(
    bench: Bench, worker: WorkerRig, owner: Owner
) -> None:
    _open(bench, "s", tenant="t1")
    before = bench.checkpoints.find(PATH)

    owner.save(changed=False)
    owner.save(changed=False, overwrite=True)
    _ask(bench, "s", 0, tenant="t1")
    worker.drain()

    after = bench.checkpoints.find(PATH)
    assert _failure(bench, "s", 0) is None
    assert after.public and after.content == before.content
    assert bench.checkpoints.content(before.content) == after


@for_each_new_content
def test_an_owners_session_ends_with_its_content_too_and_says_why(
    bench: Bench, worker: WorkerRig, owner: Owner, end: Callable[[Owner], None]
) -> None:
    _open(bench, "mine", tenant="t0")

    end(owner)
    _ask(bench, "mine", 0, tenant="t0")
    worker.drain()

    message = _failure(bench, "mine", 0)
    assert message is not None and message.endswith("open a new session on what is there now")


def test_an_owners_session_does_not_mind_what_strangers_may_read(bench: Bench, worker: WorkerRig, owner: Owner) -> None:
    _open(bench, "mine", tenant="t0")

    owner.unpublish()
    _ask(bench, "mine", 0, tenant="t0")
    worker.drain()

    assert _failure(bench, "mine", 0) is None


def test_a_sample_under_way_may_finish(bench: Bench, worker: WorkerRig, owner: Owner) -> None:
    _open(bench, "s", tenant="t1")
    _ask(bench, "s", 0, tenant="t1")
    worker.journal.before_commit = owner.unpublish

    worker.drain()

    assert _failure(bench, "s", 0) is None


def test_a_sample_given_back_by_a_worker_that_died_is_refused_by_the_next(
    bench: Bench, worker: WorkerRig, owner: Owner, make_worker: MakeWorker
) -> None:
    _open(bench, "s", tenant="t1")
    _ask(bench, "s", 0, tenant="t1")
    worker.journal.before_commit = _die
    with pytest.raises(Killed):
        worker.drain()
    owner.unpublish()

    bench.clock.move(1e7)
    make_worker().drain()

    assert _failure(bench, "s", 0) is not None


def test_an_ephemeral_session_reads_what_was_saved_for_it(bench: Bench, worker: WorkerRig, owner: Owner) -> None:
    bench.append(save_for_sampler().numbered("a", 3))
    worker.drain()
    session = "session-t0:sample:3"
    _ask(bench, session, 0, tenant="t0")
    worker.drain()

    assert _failure(bench, session, 0) is None
    bound = bench.sampling_sessions.find(session)
    # It has no name that could come to mean something else: it is an adapter and one of its operations.
    assert bound.weights is not None
    assert (bound.weights.adapter, bound.weights.seq, bound.content, bound.checkpoint) == ("a", 3, None, None)


# -- publications ----------------------------------------------------------------------------------------------------


def test_overwriting_what_is_public_makes_a_new_content_that_is_private_and_notes_it(
    bench: Bench, owner: Owner, clock: HandClock
) -> None:
    before = bench.checkpoints.find(PATH)

    owner.overwrite()
    owner.overwrite()

    after = bench.checkpoints.find(PATH)
    assert (before.public, after.public) == (True, False)
    assert before.content != after.content
    with pytest.raises(NotFound):
        bench.checkpoints.find(PATH, tenant="t1")
    entries = bench.stores.audit.entries("t0", start=0, end=clock.now() + 1)
    assert [entry.details for entry in entries if entry.event == "checkpoint_unpublish"] == [
        {"tinker_path": PATH, "training_run": "a", "reason": "overwritten"}
    ]


def test_every_save_of_something_else_has_an_id_of_its_own_for_ever(bench: Bench, owner: Owner) -> None:
    contents = [bench.checkpoints.find(PATH).content]
    for end in ENDS[2:]:
        if end is Owner.delete:
            continue
        end(owner)
        contents.append(bench.checkpoints.find(PATH).content)

    assert len(set(contents)) == len(contents)


# -- loads -----------------------------------------------------------------------------------------------------------


def _load(bench: Bench, lane: str, seq: int, content: str) -> None:
    """A load of another run's checkpoint as the API stores it."""
    body = json.dumps({"path": PATH, "optimizer": True, "content": content}).encode()
    kind = OperationKind.LOAD_WEIGHTS
    bench.append(
        Submission(tenant="t1", lane=lane, seq=seq, kind=kind, digest=digest(body), payload=Payload(inline=body))
    )


@pytest.fixture
def loading(bench: Bench, worker: WorkerRig, owner: Owner) -> None:
    """Tenant ``t1`` has a run ``mine`` whose load of what is public was accepted, and waits."""
    bench.adapter("mine", tenant="t1")
    worker.drain()
    _load(bench, "mine", 1, bench.checkpoints.find(PATH, tenant="t1").content)


@pytest.mark.usefixtures("loading")
def test_an_accepted_load_was_allowed_and_goes_on_after_unpublishing(
    bench: Bench, worker: WorkerRig, owner: Owner
) -> None:
    owner.unpublish()

    worker.drain()

    assert _failure(bench, "mine", 1) is None
    assert worker.state_before("mine", 2).steps == 1


@pytest.mark.usefixtures("loading")
@for_each_new_content
def test_an_accepted_load_never_reads_another_content(
    bench: Bench, worker: WorkerRig, owner: Owner, end: Callable[[Owner], None]
) -> None:
    worker.journal.after_claim = _die
    with pytest.raises(Killed):
        worker.drain()

    end(owner)
    bench.clock.move(1e7)
    worker.drain()

    message = _failure(bench, "mine", 1)
    assert message is not None and "not any more" in message


def test_a_load_of_another_run_that_was_nothing_when_it_was_accepted_stays_nothing(
    bench: Bench, worker: WorkerRig, owner: Owner
) -> None:
    bench.adapter("mine", tenant="t0")
    body = json.dumps({"path": PATH, "optimizer": True}).encode()
    kind, payload = OperationKind.LOAD_WEIGHTS, Payload(inline=body)
    bench.append(Submission(tenant="t0", lane="mine", seq=1, kind=kind, digest=digest(body), payload=payload))

    worker.drain()

    message = _failure(bench, "mine", 1)
    assert message is not None and f"no checkpoint '{PATH}'" in message


# -- copies ----------------------------------------------------------------------------------------------------------


@for_each_end
def test_a_copy_is_a_content_of_its_own_and_a_resend_finds_it_whatever_its_source_is_now(
    bench: Bench, worker: WorkerRig, owner: Owner, end: Callable[[Owner], None]
) -> None:
    copies = bench.checkpoints
    new = NewCopy(source=PATH, tenant="t1", session="session-t1", adapter="c", expires_at=None)
    path = copies.copy(new)
    copied = bench.checkpoints.find(path, tenant="t1")
    assert copied.content != bench.checkpoints.find(PATH).content

    end(owner)

    assert copies.copy(new) == path
    assert bench.checkpoints.find(path, tenant="t1") == copied
    with pytest.raises(Conflict):
        copies.copy(NewCopy(source=f"{PATH}y", tenant="t1", session="session-t1", adapter="c", expires_at=None))


def _die() -> None:
    raise Killed


def test_a_sample_is_found_again_by_the_run_it_was_drawn_from_and_by_its_own_id(
    bench: Bench, worker: WorkerRig, owner: Owner
) -> None:
    _open(bench, "s", tenant="t0")
    _ask(bench, "s", 7, tenant="t0")
    sessions = bench.stores.sampling_sessions

    assert sessions.run_sampled_before("session-t0", run="a", seq=7) == PATH
    assert sessions.run_sampled_before("session-t0", run="a", seq=8) is None
    assert sessions.run_sampled_before("session-t0", run="aa", seq=7) is None
    assert sessions.request("s:req:7", tenant="t0").inline == sample_body("s", 7)
    for request_id, tenant in (("s:req:7", "t1"), ("s:req:8", "t0"), ("a:req:1", "t0")):
        with pytest.raises(NotFound):
            sessions.request(request_id, tenant=tenant)
