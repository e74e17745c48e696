"""Contrastive loss on embeddings.

Shapes: B embeddings of this rank, A of all ranks, G groups of them, N candidates, H size of an embedding.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import distributed
from torch.nn.functional import normalize

from twinkle.core.errors import InvalidInput
from twinkle.data_format.batch import LossOutput
from twinkle.loss.base import Loss, Tensors, require


class InfonceLoss(Loss):
    """``-log(exp(s(q, d+) / t) / sum over candidates of exp(s / t))``, mean over groups; s a cosine, t temperature.

    Rows are groups: a row with label 1 is a query q, the next its positive d+, the others its negatives. Candidates are
    d+ and the group's negatives; with ``use_batch`` also the documents of the other groups; with ``include_qq`` the
    other queries, compared with q; with ``include_dd`` the other groups' documents, compared with d+.
    ``hard_negatives`` fixes the number of negatives a group has: more are cut, fewer repeated in turn.
    ``mask_fake_negative`` leaves out candidates of other groups more similar than ``s(q, d+) + fake_neg_margin``.
    The groups of all ranks of ``process_group`` are compared: each rank brings whole groups, all get one loss, and
    their gradients add up to its gradient times their number, as those of means over each rank's rows do. A model gives
    the group of its own ranks if a script names none.
    Source: arXiv 1807.03748, eq. 4; the further candidates and the mask: Qwen3 Embedding (arXiv 2506.05176), eq. 1.
    """

    require_logps: ClassVar[bool] = False

    def __init__(
        self,
        temperature: float = 0.1,
        use_batch: bool = True,
        hard_negatives: int | None = None,
        mask_fake_negative: bool = False,
        fake_neg_margin: float = 0.1,
        include_qq: bool = False,
        include_dd: bool = False,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        if temperature <= 0:
            raise InvalidInput("temperature", f"is {temperature}, must be positive")
        self.temperature = temperature
        self.use_batch = use_batch
        self.hard_negatives = hard_negatives
        self.mask_fake_negative = mask_fake_negative
        self.fake_neg_margin = fake_neg_margin
        self.include_qq = include_qq
        self.include_dd = include_dd
        self.process_group = process_group

    def __call__(self, inputs: Tensors, outputs: Tensors, **kwargs: object) -> LossOutput:
        """The loss of the batch: ``inputs["labels"]`` (B,) mark the queries, ``outputs["embeddings"]`` are (B, H)."""
        embeddings_BH = require(outputs, "embeddings", where="outputs")
        dtype = torch.promote_types(embeddings_BH.dtype, torch.float32)
        embeddings_BH = normalize(embeddings_BH.to(dtype), dim=-1)
        labels_B = require(inputs, "labels", where="inputs").flatten()
        if self.process_group is not None and self.process_group.size() > 1:
            self._groups(embeddings_BH, labels_B)
            labels_B = _rows_of_all(labels_B.to(embeddings_BH.device), self.process_group)
            embeddings_BH = _RowsOfAll.apply(embeddings_BH, self.process_group)
        queries_GH, documents = self._groups(embeddings_BH, labels_B)
        documents_NH = torch.cat(documents)
        owner_N = torch.cat([torch.full((len(group),), index) for index, group in enumerate(documents)])
        owner_N = owner_N.to(embeddings_BH.device)
        positives_GH = torch.stack([group[0] for group in documents])
        positive_G = (queries_GH * positives_GH).sum(dim=1)
        index_G = torch.arange(len(queries_GH), device=embeddings_BH.device)
        own_GN = owner_N[None, :] == index_G[:, None]
        scores_GN = queries_GH @ documents_NH.t()
        counted_GN = own_GN | self._counts(scores_GN, positive_G) if self.use_batch else own_GN
        candidates = [scores_GN.masked_fill(~counted_GN, -torch.inf)]
        if self.include_qq:
            scores_GG = queries_GH @ queries_GH.t()
            counted_GG = self._counts(scores_GG, positive_G) & (index_G[None, :] != index_G[:, None])
            candidates.append(scores_GG.masked_fill(~counted_GG, -torch.inf))
        if self.include_dd:
            between_GN = positives_GH @ documents_NH.t()
            counted_GN = self._counts(between_GN, positive_G) & ~own_GN
            candidates.append(between_GN.masked_fill(~counted_GN, -torch.inf))
        total_G = torch.logsumexp(torch.cat(candidates, dim=1) / self.temperature, dim=1)
        return LossOutput(loss=(total_G - positive_G / self.temperature).mean(), num_tokens=1)

    def _groups(self, embeddings_BH: torch.Tensor, labels_B: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        starts = (labels_B == 1).nonzero().flatten().tolist()
        if not starts or starts[0] != 0 or len(labels_B) != len(embeddings_BH):
            raise InvalidInput(
                "inputs.labels", "must have one value an embedding and begin with 1, the mark of a query"
            )
        documents: list[torch.Tensor] = []
        for start, end in zip(starts, [*starts[1:], len(labels_B)], strict=True):
            if end - start < 2:
                raise InvalidInput(f"inputs.labels[{start}]", "starts a group without a positive; send query, positive")
            documents.append(self._fix_negatives(embeddings_BH[start + 1 : end]))
        return embeddings_BH[starts], documents

    def _fix_negatives(self, documents_NH: torch.Tensor) -> torch.Tensor:
        num_negatives = len(documents_NH) - 1
        if self.hard_negatives is None or num_negatives == 0:
            return documents_NH
        kept = [0, *(1 + index % num_negatives for index in range(self.hard_negatives))]
        return documents_NH[kept]

    def _counts(self, scores: torch.Tensor, positive_G: torch.Tensor) -> torch.Tensor:
        if not self.mask_fake_negative:
            return torch.ones_like(scores, dtype=torch.bool)
        return scores <= (positive_G + self.fake_neg_margin)[:, None]


def _rows_of_all(values_B: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks (A, ...) in the order of the ranks, which may have different numbers of them; no graph."""
    sizes = _sizes(values_B, group)
    padded = values_B.new_zeros((max(sizes), *values_B.shape[1:]))
    padded[: len(values_B)] = values_B
    gathered = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(gathered, padded, group=group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


class _RowsOfAll(torch.autograd.Function):
    """The same with a graph to this rank's rows: their gradient times the number of ranks, over which a mean is taken
    afterwards."""

    @staticmethod
    def forward(ctx: Any, values_B: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        """The rows of all ranks."""
        rank = distributed.get_rank(group)
        sizes = _sizes(values_B, group)
        ctx.first, ctx.size, ctx.num_ranks = sum(sizes[:rank]), len(values_B), len(sizes)
        return _rows_of_all(values_B, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        """That of this rank's rows."""
        return ctx.num_ranks * gradients[0][ctx.first : ctx.first + ctx.size], None


def _sizes(values_B: torch.Tensor, group: distributed.ProcessGroup) -> list[int]:
    own = torch.tensor([len(values_B)], device=values_B.device)
    sizes = [torch.empty_like(own) for _ in range(group.size())]
    distributed.all_gather(sizes, own, group=group)
    return [int(size) for size in sizes]
