"""Generalised knowledge distillation: a student's distributions drawn towards a teacher's.

Shapes: B rows, T positions (padded), V vocabulary, K of its tokens; n trained positions of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from twinkle.core.errors import InvalidInput
from twinkle.data_format.batch import LossOutput
from twinkle.loss.base import Loss, Tensors, require

RowsOfTokens = Sequence[Sequence[Sequence[float]]]
"""Of each row, of each of its tokens, K values."""
LOWEST_LOGPROB = -1e4
"""In place of minus infinity: its ``exp`` is 0 and 0 times it is 0, not NaN."""


def generalized_jsd(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """``beta KL(T || M) + (1 - beta) KL(S || M)``, ``M = beta T + (1 - beta) S``, of logprobs over the last dimension.

    At the ends it is the limit after dividing by beta or 1 - beta: 0 gives KL(T || S), 1 gives KL(S || T).
    """
    if beta == 0.0:
        return _kl(teacher, student)
    if beta == 1.0:
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(dim=-1)


class GKDLoss(Loss):
    """Mean over trained tokens of the generalised Jensen-Shannon divergence of teacher and student (arXiv 2306.13649).

    Both distributions are at ``temperature``. With ``topk`` or ``teacher_topk_logprobs``, both are restricted to the
    teacher's K tokens and normalised again over these. The student comes as ``outputs["logits"]`` (B, T, V), or as
    ``outputs["topk_logps"]`` (B, T, K), its logprobs at ``teacher_topk_indices``: these are what the engine gives for
    (N, K) target tokens, where no one keeps the vocabulary's logits. The gradient does not reach the teacher.
    """

    require_logits: ClassVar[bool] = True
    require_logps: ClassVar[bool] = False
    works_without_logits: ClassVar[bool] = True

    def __init__(
        self, beta: float = 0.5, temperature: float = 1.0, ignore_index: int = -100, chunk_size: int = 512
    ) -> None:
        if not 0 <= beta <= 1:
            raise InvalidInput("beta", f"is {beta}, must be between 0 and 1")
        if temperature <= 0:
            raise InvalidInput("temperature", f"is {temperature}, must be positive")
        if chunk_size < 1:
            raise InvalidInput("chunk_size", f"is {chunk_size}, must be at least 1")
        self.beta = beta
        self.temperature = temperature
        self.ignore_index = ignore_index
        self.chunk_size = chunk_size

    def __call__(
        self,
        inputs: Tensors,
        outputs: Tensors,
        *,
        teacher_logits: torch.Tensor | None = None,
        teacher_topk_logprobs: torch.Tensor | RowsOfTokens | None = None,
        teacher_topk_indices: torch.Tensor | RowsOfTokens | None = None,
        topk: int | None = None,
        **kwargs: object,
    ) -> LossOutput:
        """The loss of the batch; 0 when nothing is trained.

        Args:
            inputs: ``labels`` (B, T), shifted.
            outputs: The student, see the class.
            teacher_logits: (B, T, V) over the student's vocabulary; what is longer than labels is cut on the right.
            teacher_topk_logprobs: (B, T, K), cut likewise, in place of ``teacher_logits``; or a list of rows, each as
                long as its own tokens, as a sampler gives them.
            teacher_topk_indices: (B, T, K) token ids, or rows; needed where the student comes as logits.
            topk: Restrict ``teacher_logits`` to its K largest.
            kwargs: What other losses of the loop take; ignored.
        """
        mask_BT = require(inputs, "labels", where="inputs") != self.ignore_index
        if teacher_topk_logprobs is not None:
            length, device = mask_BT.shape[1], mask_BT.device
            indices_BTK = None if teacher_topk_indices is None else _in_batch(teacher_topk_indices, length, device)
            student_BTK = self._student_topk(outputs, indices_BTK)
            teacher_BTK = _in_batch(teacher_topk_logprobs, length, device)
        elif teacher_logits is not None:
            logits_BTV = require(outputs, "logits", where="outputs")
            student_BTK, teacher_BTK = _restrict(logits_BTV, teacher_logits[:, : mask_BT.shape[1]], topk)
        else:
            raise InvalidInput("teacher_logits", "are missing; send them, or teacher_topk_logprobs with their indices")
        if student_BTK.shape != teacher_BTK.shape:
            raise InvalidInput(
                "teacher_logits", f"have shape {tuple(teacher_BTK.shape)}, the student's {tuple(student_BTK.shape)}"
            )
        student_nK, teacher_nK = student_BTK[mask_BT], teacher_BTK[mask_BT].detach()
        total = student_nK[:0].sum()
        for student, teacher in zip(student_nK.split(self.chunk_size), teacher_nK.split(self.chunk_size), strict=True):
            total = total + checkpoint(self._chunk_total, student, teacher, use_reentrant=False)
        return LossOutput(loss=total / max(1, len(student_nK)), num_tokens=1)

    @staticmethod
    def _student_topk(outputs: Tensors, indices_BTK: torch.Tensor | None) -> torch.Tensor:
        if outputs.get("topk_logps") is not None:
            return outputs["topk_logps"]
        if indices_BTK is None:
            raise InvalidInput("teacher_topk_indices", "are missing; they say which tokens the logprobs belong to")
        return require(outputs, "logits", where="outputs").gather(-1, indices_BTK)

    def _chunk_total(self, student_nK: torch.Tensor, teacher_nK: torch.Tensor) -> torch.Tensor:
        return generalized_jsd(self._logprobs(student_nK), self._logprobs(teacher_nK), self.beta).sum()

    def _logprobs(self, scores: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(scores.dtype, torch.float32)
        return torch.log_softmax(scores.to(dtype) / self.temperature, dim=-1).clamp(min=LOWEST_LOGPROB)


def _in_batch(rows: torch.Tensor | RowsOfTokens, length: int, device: torch.device) -> torch.Tensor:
    """Rows of (T_row, K) as (B, T, K): padded or cut on the right, where nothing is trained."""
    if isinstance(rows, torch.Tensor):
        # As long as the longest row of all ranks, or with a prompt to answer at its end.
        return rows[:, :length].to(device)
    tensors = [torch.as_tensor(row, device=device)[:length] for row in rows]
    return torch.stack([pad(row, (0, 0, 0, length - len(row))) for row in tensors])


def _restrict(
    student_BTV: torch.Tensor, teacher_BTV: torch.Tensor, topk: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if topk is None:
        return student_BTV, teacher_BTV
    teacher_BTK, indices_BTK = teacher_BTV.topk(topk, dim=-1)
    return student_BTV.gather(-1, indices_BTK), teacher_BTK
