"""Entropies of rows of logits, and their gradient, a few rows at a time.

With ``p`` a row's probabilities, ``H = -sum(p log p)``; the gradient of ``-H`` by the logits is ``p (log p + H)``.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_ROWS_AT_ONCE = 32
"""Of which log-probabilities, probabilities and their products are held at once."""


def entropies(logits_nV: torch.Tensor) -> torch.Tensor:
    """The entropy of each row (n,), in nats."""
    return torch.cat([_terms(logits_nV[rows])[2] for rows in _blocks(len(logits_nV))])


def add_gradient_(d_logits_nV: torch.Tensor, logits_nV: torch.Tensor, weights_n: torch.Tensor) -> None:
    """Add the gradient of ``-sum(w H)``, w a weight of each row, to the logits' gradient."""
    for rows in _blocks(len(logits_nV)):
        logprobs_nV, probs_nV, entropies_n = _terms(logits_nV[rows])
        slopes_nV = logprobs_nV.add_(entropies_n[:, None]).mul_(probs_nV)
        d_logits_nV[rows].add_(slopes_nV.mul_(weights_n[rows, None]))


def _terms(logits_nV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs_nV = torch.log_softmax(logits_nV, dim=-1)
    probs_nV = torch.softmax(logits_nV, dim=-1)
    return logprobs_nV, probs_nV, _row_sums(probs_nV * logprobs_nV).neg_()


def _row_sums(terms_nV: torch.Tensor) -> torch.Tensor:
    """The sum of each row (n,); the terms' memory is used up.

    Halves are added to halves, element by element: the bits of a row depend on nothing but the row. Those of
    ``torch.sum`` depend on how many rows there are, and so do those of softmax's own backward pass.
    """
    width = terms_nV.shape[1]
    while width > 1:
        half = (width + 1) // 2
        terms_nV[:, : width - half].add_(terms_nV[:, half:width])
        width = half
    return terms_nV[:, 0].clone()


def _blocks(num_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        yield slice(start, start + _ROWS_AT_ONCE)
