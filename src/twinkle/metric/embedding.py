"""How near embeddings lie to what they belong to, and how far from the rest.

Shapes: B embeddings, G queries, H size of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import normalize

from twinkle.metric.base import Metric, Results


@dataclass(frozen=True)
class Similarities:
    """Of one batch on one rank: the queries and their positives as unit vectors (G, H), and the loss."""

    queries: torch.Tensor
    positives: torch.Tensor
    loss: float | None


class EmbeddingMetric(Metric):
    """Cosines: ``pos_sim`` of a query and its positive (with ``_min`` and ``_max``), ``neg_sim`` of a query and the
    other queries' positives in the batch, of all ranks; and the mean ``loss`` and last ``grad_norm``.

    Rows are groups as for ``InfonceLoss``: one with label 1 is a query, the next its positive.
    """

    def reset(self) -> None:
        """Forget what was accumulated."""
        self._parts: list[Similarities] = []
        self._grad_norm = 0.0

    def accumulate(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, Any],
        *,
        grad_norm: float | torch.Tensor | None = None,
        **kwargs: object,
    ) -> None:
        """Take one batch in; one without embeddings is passed over."""
        if grad_norm is not None:
            self._grad_norm = float(grad_norm)
        embeddings_BH = outputs.get("embeddings")
        if embeddings_BH is None or inputs.get("labels") is None:
            return
        embeddings_BH = normalize(embeddings_BH.detach().to("cpu", torch.float32), dim=-1)
        starts_G = (inputs["labels"].flatten().cpu() == 1).nonzero().flatten()
        starts_G = starts_G[starts_G + 1 < len(embeddings_BH)]
        loss = outputs.get("loss")
        self._parts.append(
            Similarities(embeddings_BH[starts_G], embeddings_BH[starts_G + 1], None if loss is None else float(loss))
        )

    def calculate(self) -> Results:
        """The values over all ranks, as text; empty when nothing came."""
        mine, grad_norm = self._parts, self._grad_norm
        # A batch is what all ranks had at the same time.
        steps = self.gather_results([(step, part) for step, part in enumerate(mine)])
        self.reset()
        positives: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for step in sorted({number for number, _ in steps}):
            parts = [part for number, part in steps if number == step]
            scores_GG = torch.cat([p.queries for p in parts]) @ torch.cat([p.positives for p in parts]).t()
            positives.append(scores_GG.diagonal())
            others.append(scores_GG[~torch.eye(len(scores_GG), dtype=torch.bool)])
        results: Results = {}
        if positives and len(near := torch.cat(positives)):
            results |= {
                "pos_sim": f"{float(near.mean()):.4f}",
                "pos_sim_min": f"{float(near.min()):.4f}",
                "pos_sim_max": f"{float(near.max()):.4f}",
            }
            if len(far := torch.cat(others)):
                results["neg_sim"] = f"{float(far.mean()):.4f}"
        losses = [part.loss for _, part in steps if part.loss is not None]
        if losses:
            results["loss"] = f"{sum(losses) / len(losses):.4f}"
        if grad_norm > 0:
            results["grad_norm"] = f"{grad_norm:.6f}"
        return results
