"""Small batches in float64, and the rows of them as plain lists for references written without tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from twinkle.loss import Loss

torch.set_num_threads(1)
IGNORED = -100


@dataclass(frozen=True, eq=False)
class Batch:
    """Logprobs of a few rows of different lengths, and the same per row, trained positions only, as lists."""

    labels: torch.Tensor
    logps: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        return self.labels != IGNORED

    def rows(self, values: torch.Tensor | None = None) -> list[list[float]]:
        values = self.logps if values is None else values
        return [row[mask].tolist() for row, mask in zip(values, self.mask, strict=True)]

    def value(self, loss: Loss, **kwargs: object) -> float:
        return float(self.run(loss, self.logps, **kwargs))

    def run(self, loss: Loss, logps: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return loss({"labels": self.labels}, {"logps": logps}, **kwargs)["loss"]

    def gradient(self, loss: Loss, **kwargs: object) -> torch.Tensor:
        leaf = self.logps.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.run(loss, leaf, **kwargs), leaf)
        return gradient

    def check_gradient(self, loss: Loss, **kwargs: object) -> bool:
        leaf = self.logps.clone().requires_grad_(True)
        return torch.autograd.gradcheck(lambda x: self.run(loss, x, **kwargs), leaf)


MakeBatch = Callable[..., Batch]


@pytest.fixture
def make_batch() -> MakeBatch:
    def make(seed: int = 0, *, num_rows: int = 4, length: int = 6, empty_row: int | None = None) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 9, (num_rows, length), generator=generator)
        labels[torch.rand(num_rows, length, generator=generator) < 0.35] = IGNORED
        labels[:, 1] = 3
        if empty_row is not None:
            labels[empty_row] = IGNORED
        logps = -0.1 - 2 * torch.rand(num_rows, length, generator=generator, dtype=torch.float64)
        return Batch(labels, logps)

    return make
