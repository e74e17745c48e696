"""Custom losses in the journal: found by every worker and every replay, also long after their session has gone."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest

from harness import traced_losses
from harness.journal import Bench, digest
from harness.operations import optim_step
from harness.traced_losses import encoded
from harness.worker import Killed, MakeWorker
from twinkle.core.errors import Conflict, NotFound
from twinkle.core.operation import OperationKind, Payload, Submission
from twinkle.wire.training import ForwardBackwardBody, WireDatum, encode_forward_backward

SESSION = "session-t0"
RUN = f"{SESSION}:train:0"
BODY = json.dumps(encoded(traced_losses.likelihood, {"logprobs": 1, "weights": 1}, session=SESSION)).encode()
RESULT = b'{"loss_id": "any"}'


def loss(number: int, *, body: bytes = BODY, tenant: str = "t0", rejection: str | None = None) -> Submission:
    return Submission(
        tenant=tenant,
        lane=f"{SESSION}:loss",
        seq=number,
        kind=OperationKind.CREATE_CUSTOM_LOSS,
        digest=digest(body),
        payload=Payload(inline=body),
        rejection=rejection,
    )


def custom_pass(seq: int, loss_id: object, *, run: str = RUN) -> Submission:
    tokens = np.array([1, 2], dtype=np.int64)
    body = encode_forward_backward(
        ForwardBackwardBody(
            model_id=run,
            seq_id=seq,
            forward_only=False,
            loss_fn="custom",
            loss_fn_config={} if loss_id is None else {"loss_id": loss_id},  # type: ignore[dict-item]
            data=(WireDatum(tokens, {"target_tokens": tokens}),),
        )
    )
    return Submission(
        tenant="t0",
        lane=run,
        seq=seq,
        kind=OperationKind.FORWARD_BACKWARD,
        digest=digest(body),
        payload=Payload(inline=body),
        num_tokens=2,
    )


def test_a_loss_is_complete_when_it_is_accepted_and_a_resend_changes_nothing(bench: Bench) -> None:
    first = bench.journal.record_loss(loss(0), result=RESULT)
    again = bench.journal.record_loss(loss(0), result=b"other")

    status = bench.journal.statuses([first.request_id])[first.request_id]
    assert (first.is_new, again.is_new, again.request_id) == (True, False, first.request_id)
    assert status.tenant == "t0"
    assert status.status.result is not None
    assert status.status.result.inline == RESULT
    assert bench.journal.loss_definition(f"{SESSION}:loss", 0) == BODY
    with pytest.raises(Conflict):
        bench.journal.record_loss(loss(0, body=b"another"), result=RESULT)
    with pytest.raises(NotFound):
        bench.journal.record_loss(loss(1, tenant="t1"), result=RESULT)


def test_a_rejected_loss_is_no_loss(bench: Bench) -> None:
    ticket = bench.journal.record_loss(loss(0, rejection="a reason"), result=RESULT)

    failure = bench.journal.statuses([ticket.request_id])[ticket.request_id].status.failure
    assert failure is not None
    assert (failure.message, failure.category) == ("a reason", "user")
    assert bench.journal.loss_definition(f"{SESSION}:loss", 0) is None


def test_no_sweep_takes_a_loss_away_and_no_mesh_is_nudged_for_it(bench: Bench) -> None:
    bench.journal.record_loss(loss(0), result=RESULT)
    bench.clock.move(10 * 365 * 24 * 3600)

    bench.upkeep.close_gaps(older_than_s=1)
    bench.upkeep.expire_overdue(deadline_s=1)
    bench.upkeep.expire_results(older_than_s=1)

    assert bench.journal.ready_meshes() == []
    assert bench.journal.loss_definition(f"{SESSION}:loss", 0) == BODY


def test_workers_killed_between_passes_find_the_loss_again(bench: Bench, make_worker: MakeWorker) -> None:
    bench.journal.record_loss(loss(0), result=RESULT)
    bench.adapter(RUN)
    passes = [custom_pass(seq, f"{SESSION}:loss:0") for seq in (1, 2, 4)]
    steps = [optim_step().numbered(RUN, 3), optim_step().numbered(RUN, 5)]
    bench.append(*sorted([*passes, *steps], key=lambda one: one.seq))
    for _ in range(4):
        worker = make_worker(max_attempts=100)
        worker.drain(1)
        worker.journal.before_commit = _die
        with suppress(Killed):
            worker.drain()

    last = make_worker()
    last.drain()

    assert all(bench.status(RUN, seq).result is not None for seq in range(1, 6))
    undisturbed = make_worker()
    assert undisturbed.transfers.at_once(undisturbed.replay.state_after(RUN, 5)).state == last.state_before(RUN, 6)


@pytest.mark.parametrize(
    ("loss_id", "said"),
    [
        (None, "loss_id: is missing"),
        (1.0, "loss_id: is missing"),
        ("nonsense", "must have the form"),
        (f"{SESSION}:loss:1", "no custom loss"),
        ("session-t1:loss:0", "no custom loss"),
        (f"{SESSION}:loss:99999999999999999999", "must have the form"),
    ],
)
def test_a_loss_of_another_session_and_one_that_was_never_made_answer_alike(
    bench: Bench, make_worker: MakeWorker, loss_id: object, said: str
) -> None:
    bench.journal.record_loss(loss(0), result=RESULT)
    theirs = Submission(
        tenant="t1",
        lane="session-t1:loss",
        seq=0,
        kind=OperationKind.CREATE_CUSTOM_LOSS,
        digest="d",
        payload=Payload(inline=BODY),
    )
    bench.journal.record_loss(theirs, result=RESULT)
    bench.adapter(RUN)
    bench.append(custom_pass(1, loss_id), optim_step().numbered(RUN, 2))

    make_worker().drain()

    failure = bench.status(RUN, 1).failure
    assert failure is not None
    assert failure.category == "user"
    assert said in failure.message


def _die() -> None:
    raise Killed
