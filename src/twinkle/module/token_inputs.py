"""What a decoder is given of its tokens: their embeddings, and where each layer reads the tokens once more, that too.

Gemma 4's smaller models look every token up a second time, in a table with a few features for each layer; the first
routers of DeepSeek-V4 go by the tokens themselves. So that one tensor stands for a token from the embedding to the
decoder, these lie behind its embedding until the decoder is called, ids as digits that every dtype holds exactly.

Shapes: T packed tokens, H hidden size, L layers, F features of a layer, W = H + L * F; N digits.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

BASE = 256
"""bfloat16 holds all integers up to it."""
NUM_DIGITS = 3


class TokenInputs:
    """From token ids to one row for each, and from rows to what the decoder is called with."""

    def __init__(self, model: Any, decoder: Any) -> None:
        self._embedding = model.get_input_embeddings()
        self._num_features = getattr(decoder.config, "hidden_size_per_layer_input", None) or 0
        self._by_token = any(isinstance(module, DeepseekV4HashRouter) for module in decoder.modules())
        self._num_tokens = self._embedding.weight.shape[0]
        self._decoder = decoder

    @property
    def tables(self) -> list[torch.nn.Module]:
        """The modules in which tokens are looked up outside of the decoder."""
        return [self._embedding, *([self._decoder.embed_tokens_per_layer] if self._num_features else [])]

    def __call__(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """The rows [T, W] of tokens, [T, H] where no layer reads them once more."""
        embeddings_TH: torch.Tensor = self._embedding(tokens_T)
        if self._by_token:
            digits_TN = torch.stack([tokens_T // BASE**place % BASE for place in range(NUM_DIGITS)], dim=1)
            return torch.cat((embeddings_TH, digits_TN.to(embeddings_TH.dtype)), dim=1)
        if not self._num_features:
            return embeddings_TH
        return torch.cat((embeddings_TH, self._decoder.get_per_layer_inputs(tokens_T, None).flatten(1)), dim=1)

    def arguments(self, rows_TW: torch.Tensor) -> dict[str, torch.Tensor]:
        """The decoder's arguments for a row of packed tokens."""
        if self._by_token:
            embeddings_TH, digits_TN = rows_TW.tensor_split([rows_TW.shape[1] - NUM_DIGITS], dim=1)
            # A row may be NaN as a whole; its token is none then, but it must be one of the table's.
            places_N = BASE ** torch.arange(NUM_DIGITS, device=rows_TW.device)
            ids_T = (digits_TN.detach().float().nan_to_num(0).long() * places_N).sum(1).clamp(0, self._num_tokens - 1)
            return {"inputs_embeds": embeddings_TH[None], "token_ids": ids_T[None]}
        if not self._num_features:
            return {"inputs_embeds": rows_TW[None]}
        embeddings_TH, by_layer_TF = rows_TW.tensor_split([self._embedding.weight.shape[1]], dim=1)
        by_layer_TLF = by_layer_TF.unflatten(1, (-1, self._num_features))
        return {"inputs_embeds": embeddings_TH[None], "per_layer_inputs": by_layer_TLF[None]}
