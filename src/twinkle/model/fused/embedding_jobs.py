"""Jobs whose loss compares embeddings: each has the passes of its rows to itself, on every rank alike.

Shapes: B datums, N tokens of one, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from twinkle.core.batch_loss import BATCH_LOSSES, GROUP_LABELS, judge_batch
from twinkle.core.errors import UserError
from twinkle.core.slices import Slices
from twinkle.infra.rank_group import RankGroup
from twinkle.loss import create_loss
from twinkle.model.fused.embedding import FusedEmbedding
from twinkle.model.fused.job_run import FailureReport
from twinkle.model.fused.training import TrainJob, TrainOutcome


def compares_embeddings(job: TrainJob) -> bool:
    """Whether it is a job for :func:`run_embedding_job`."""
    return job.loss in BATCH_LOSSES and BATCH_LOSSES[job.loss].embeds


def run_embedding_job(job: TrainJob, engine: FusedEmbedding, ranks: RankGroup) -> Slices[TrainOutcome | Exception]:
    """Run a judged job a pass at a time. What goes wrong on any rank leaves the adapter of every rank as it was."""
    rows = [torch.from_numpy(np.array(datum.tokens, dtype=np.int64)) for datum in job.data]
    gradient = torch.zeros_like(job.adapter.grad)
    work = _run(job, rows, engine, gradient)
    num_pauses = engine.num_passes(rows) * (2 if job.backward else 1) - 1
    outcome: TrainOutcome | None = None
    failure: Exception | None = None
    while outcome is None and failure is None:
        try:
            next(work)
        except StopIteration as end:
            outcome = end.value
        except Exception as error:  # noqa: BLE001 - whatever one job's numbers provoke must not reach its neighbours
            failure = error if isinstance(error, UserError) else error.with_traceback(None)
        else:
            num_pauses -= 1
            yield
    # A rank on which it failed pauses as often as the others.
    for _ in range(num_pauses if ranks.size > 1 else 0):
        yield
    if ranks.size > 1:
        reports = ranks.gather(None if failure is None else FailureReport.of(failure))
        failure = next((report.to_error() for report in reports if report is not None), None)
    if failure is not None:
        return failure
    assert outcome is not None
    if job.backward:
        job.adapter.grad.add_(gradient)
        job.adapter.has_gradients = True
    return outcome


def _run(
    job: TrainJob, rows: Sequence[torch.Tensor], engine: FusedEmbedding, gradient: torch.Tensor
) -> Slices[TrainOutcome]:
    embeddings_BH = (yield from engine.embed(rows, job.adapter)).requires_grad_(job.backward)
    settings = judge_batch(job.loss, job.loss_config, [datum.inputs for datum in job.data])
    labels_B = torch.tensor([int(datum.inputs[GROUP_LABELS].item()) for datum in job.data])
    with torch.enable_grad():
        loss = create_loss(job.loss, **settings)({"labels": labels_B}, {"embeddings": embeddings_BH})["loss"]
    if not bool(torch.isfinite(loss)):
        raise UserError(f"{job.loss} is {float(loss)} here, and must be finite; nothing of this operation was applied")
    if job.backward:
        (d_embeddings_BH,) = torch.autograd.grad(loss, embeddings_BH)
        yield
        yield from engine.add_gradient_to(gradient, rows, job.adapter, d_embeddings_BH)
    num_tokens = sum(len(row) for row in rows)
    value = float(loss.detach())
    return TrainOutcome(
        logprobs=[],
        loss=value,
        num_tokens=num_tokens,
        metrics={"loss:sum": value, "num_tokens:sum": float(num_tokens)},
        embeddings=list(embeddings_BH.detach().numpy()),
    )
