"""Models and adapters as GGUF files, a tensor in memory at a time."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch

from twinkle.core.errors import ConfigError
from twinkle.module.expert_forms import GATED
from twinkle.workers.jobs.export import quantized
from twinkle.workers.jobs.export.gguf_architectures import find_architecture, head_dim_of, rope_factors, row_order
from twinkle.workers.jobs.export.gguf_vocabulary import Vocabulary
from twinkle.workers.jobs.export.merged import MergedModel
from twinkle.workers.jobs.export.requests import sha256_of
from twinkle.workers.jobs.export.skeleton import Skeleton
from twinkle.workers.jobs.export.updates import TrainedWeight

KINDS = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SUFFIXES = (".weight", ".bias")
_EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<after>.*)")
_ROUTER = ".ffn_gate_inp."
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]
    is_in_blocks: bool = False


class GgufNames:
    """What tensors of a model are called in GGUF."""

    def __init__(self, skeleton: Skeleton) -> None:
        """Find the architecture.

        Raises:
            ConfigError: It is not converted.
        """
        self.architecture = find_architecture(skeleton)
        self.config = skeleton.model.config
        self.ordered = row_order(self.architecture, self.config)
        self._names = gguf.get_tensor_name_map(self.architecture.arch, self.config.num_hidden_layers)

    def of(self, name: str) -> str:
        """The name of one of transformers' tensors, those of experts without their numbers.

        Raises:
            ConfigError: There is none.
        """
        found = self._names.get_name(name, try_suffixes=_SUFFIXES)
        if found is None:
            raise ConfigError(f"{name} has no place in GGUF's {self.architecture.name}; export it as peft or merged")
        return found


class GgufModel:
    """A merged model in one file."""

    def __init__(
        self, merged: MergedModel, skeleton: Skeleton, folder: Path, *, name: str, is_quantized: bool = False
    ) -> None:
        """Plan the file.

        Args:
            merged: The tensors.
            skeleton: Of the base.
            folder: The base's, for the tokenizer.
            name: What the model is called in the file.
            is_quantized: Put matrices into blocks of eight bits.

        Raises:
            ConfigError: The model or its tokenizer is not converted.
        """
        self._merged = merged
        self._names = GgufNames(skeleton)
        self._name = name
        self._is_quantized = is_quantized
        self._tensors = list(self._planned())
        rows = next(tensor.shape[0] for tensor in self._tensors if tensor.name == "token_embd.weight")
        self.vocabulary = Vocabulary(folder, num_rows=rows)
        self.dtype = max((t.dtype for t in self._tensors if len(t.shape) > 1), key=[*KINDS].index)

    def write(self, path: Path) -> str:
        """Write the file; its SHA-256."""
        return write_gguf(path, self._names.architecture.name, self._describe, self._tensors)

    def _planned(self) -> Iterator[GgufTensor]:
        experts: dict[str, dict[int, str]] = defaultdict(dict)
        planned = {tensor.name: tensor for tensors in self._merged.files.values() for tensor in tensors}
        for name, tensor in planned.items():
            match = _EXPERT.fullmatch(name)
            if match is not None:
                experts[f"{match['before']}.{match['after']}"][int(match["number"])] = name
                continue
            stored = self._names.of(name)
            # Norms, biases and routers are computed with in float32.
            is_plain = len(tensor.shape) > 1 and _ROUTER not in stored
            dtype = _STORED[tensor.dtype] if is_plain else torch.float32
            blocks = self._is_quantized and quantized.takes_blocks(name, tensor.shape)
            yield GgufTensor(stored, tensor.shape, dtype, self._reader(name, dtype), is_in_blocks=blocks)
        for name, numbered in experts.items():
            parts = [numbered[number] for number in sorted(numbered)]
            first = planned[parts[0]]
            dtype = _STORED[first.dtype]
            shape = (len(parts), *first.shape)
            blocks = self._is_quantized and quantized.takes_blocks(name, shape)
            yield GgufTensor(self._names.of(name), shape, dtype, self._stack_of(parts, dtype), is_in_blocks=blocks)
        factors = rope_factors(self._names.config)
        if factors is not None:
            yield GgufTensor(_ROPE_FACTORS, tuple(factors.shape), torch.float32, lambda: factors)

    def _reader(self, name: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        return lambda: self._names.ordered(name, self._merged.tensor(name)).to(dtype)

    def _stack_of(self, names: Sequence[str], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        return lambda: torch.stack([self._merged.tensor(name) for name in names]).to(dtype)

    def _describe(self, writer: gguf.GGUFWriter) -> None:
        config = self._names.config
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(self._name)
        writer.add_file_type(quantized.FILE_KIND if self._is_quantized else KINDS[self.dtype][1])
        if self._is_quantized:
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim_of(config))
        writer.add_value_length(head_dim_of(config))
        writer.add_rope_dimension_count(head_dim_of(config))
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(self.vocabulary.num_rows)
        if self._names.architecture.arch is gguf.MODEL_ARCH.QWEN3MOE:
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        self.vocabulary.write(writer)


class GgufAdapter:
    """An adapter in one file, for llama.cpp's ``--lora`` and for Ollama's ``ADAPTER``."""

    def __init__(self, skeleton: Skeleton, weights: Sequence[TrainedWeight]) -> None:
        """Plan the file.

        Raises:
            ConfigError: The model is not converted, or llama.cpp has no place for what the adapter changes.
        """
        self._names = GgufNames(skeleton)
        self._skeleton = skeleton
        # llama.cpp divides one alpha by each pair's rank: what a pair's own scale has beyond that goes into its B.
        self._alpha = max((weight.shape.scale * weight.shape.rank for weight in weights), default=1.0)
        if skeleton.is_tied and any(weight.name == skeleton.head for weight in weights):
            raise ConfigError(
                f"{skeleton.architecture} has one matrix for embedding and output head, and the adapter trains the"
                " head: llama.cpp cannot apply that without changing the embedding too; export it as gguf, merged"
            )
        self._tensors = [tensor for weight in weights for tensor in self._planned(weight)]

    def write(self, path: Path) -> str:
        """Write the file; its SHA-256."""
        return write_gguf(path, self._names.architecture.name, self._describe, self._tensors)

    def _describe(self, writer: gguf.GGUFWriter) -> None:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, self._alpha)

    def updates_of(self, weight: TrainedWeight) -> dict[str, torch.Tensor]:
        """What a weight's update is in the file's terms, by the names of the tensors it is added to."""
        update = weight.shape.scale * (weight.pair.b @ weight.pair.a)
        return {self._names.of(name): rows for name, rows in self._parts(weight, update)}

    def _planned(self, weight: TrainedWeight) -> Iterator[GgufTensor]:
        shape = weight.shape
        b = weight.pair.b * (shape.scale * shape.rank / self._alpha)
        for name, rows in self._parts(weight, b):
            stored = self._names.of(name)
            yield _ready(f"{stored}.lora_a", weight.pair.a)
            yield _ready(f"{stored}.lora_b", rows)

    def _parts(self, weight: TrainedWeight, rows: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Cut what has a weight's outputs as rows into the tensors that hold them, in the file's order."""
        module, _, leaf = weight.name.rpartition(".")
        if weight.shape.num_experts is None:
            yield weight.name, self._names.ordered(weight.name, rows)
        elif leaf == GATED:
            for name, part in zip(("gate_proj", "up_proj"), rows.chunk(2, dim=-2), strict=True):
                yield f"{module}.{name}.weight", part
        else:
            yield f"{module}.{leaf}.weight", rows


def _ready(name: str, tensor: torch.Tensor) -> GgufTensor:
    return GgufTensor(name, tuple(tensor.shape), torch.float32, lambda: tensor)


def write_gguf(
    path: Path, arch: str, describe: Callable[[gguf.GGUFWriter], None], tensors: Sequence[GgufTensor]
) -> str:
    """Write a file; its SHA-256. It has its name once it is whole and on the disk."""
    temporary = path.with_name(f".{path.name}.part")
    writer = gguf.GGUFWriter(temporary, arch)
    describe(writer)
    for tensor in tensors:
        kind = quantized.KIND if tensor.is_in_blocks else KINDS[tensor.dtype][0]
        num_numbers = torch.Size(tensor.shape).numel()
        size_bytes = tensor.dtype.itemsize * num_numbers
        if tensor.is_in_blocks:
            size_bytes = num_numbers // quantized.BLOCK_NUMBERS * quantized.BLOCK_BYTES
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.uint16), size_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        made = tensor.make().contiguous()
        if tuple(made.shape) != tensor.shape or made.dtype != tensor.dtype:
            raise ConfigError(f"{tensor.name} came out as {made.dtype} {tuple(made.shape)}, not as it was planned")
        stored = quantized.in_blocks(made) if tensor.is_in_blocks else made.flatten().view(torch.uint8)
        writer.write_tensor_data(stored.flatten().numpy())
    writer.flush()
    writer.close()
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.rename(path)
    return sha256_of(path)
