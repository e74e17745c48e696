"""Root mean square norms as the served families have them; Megatron's own are Transformer Engine's."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig


class RootMeanSquareNorm(torch.nn.Module):
    """``x / rms(x) * weight`` in float32, or ``* (1 + weight)`` where the config says that weights are zero-centred.

    Its weight is marked for the sum over tensor ranks that sequence parallelism needs. The arguments after ``eps`` are
    Megatron's, which its builder sends to every norm; the config says the same.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ) -> None:
        super().__init__()
        self.eps = eps
        self.is_zero_centred = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.is_zero_centred else torch.ones
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(start(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        scaled = x.float()
        scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.is_zero_centred:
            return (scaled * (1.0 + self.weight.float())).to(x.dtype)
        weighted: torch.Tensor = self.weight * scaled.to(x.dtype)
        return weighted
