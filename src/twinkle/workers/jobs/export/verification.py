"""What was written, read back by those who will read it, and compared with what was meant.

Three models, one in memory at a time, in float32:

* base and adapter as transformers and PEFT read them;
* the base with the updates added as they are added to the files: the same logits up to float32's rounding, or the
  arithmetic of merging is wrong. Then its weights are rounded as they are stored;
* what was written, read by transformers: the same weights bit for bit, and the same logits.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import peft
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from twinkle.core.errors import StorageUnavailable
from twinkle.workers.jobs.export import quantized
from twinkle.workers.jobs.export.gguf_files import GgufAdapter
from twinkle.workers.jobs.export.merged import MergedModel
from twinkle.workers.jobs.export.skeleton import CONFIG_FILE, TIED, Skeleton, class_for
from twinkle.workers.jobs.export.tensor_files import bytes_of
from twinkle.workers.jobs.export.updates import TrainedWeight

NUM_TOKENS = 48
LIMIT = 1e-4
"""How far logits may be from what was meant, relative to their size: the rounding of float32, carried on by layers."""
_SEED = 20
_IN_BLOCKS = "quantization_difference"


@dataclass(frozen=True)
class Meant:
    """What an export is compared with.

    Args:
        tuned: The logits of base and adapter [T, V].
        stored: Those of the merged weights, rounded as they are stored.
        digests: By the names of the class's parameters, the hashes of those weights.
        figures: What is told of it.
        digests_in_blocks: Those of the weights after they were in blocks of eight bits, where that was asked for.
    """

    tuned: torch.Tensor
    stored: torch.Tensor
    digests: Mapping[str, str]
    figures: Mapping[str, float]
    digests_in_blocks: Mapping[str, str] = field(default_factory=dict)


def probe_tokens(vocab_size: int) -> torch.Tensor:
    """A row of tokens, the same for the same vocabulary."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, vocab_size, (1, NUM_TOKENS), generator=generator)


def tuned_logits(base: Path, adapter: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the base model with and without an adapter, both read by their makers' own readers.

    Raises:
        StorageUnavailable: PEFT does not find all of the adapter's weights.
    """
    model = _load(base)
    wrapped = peft.PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)
    check_peft_names(wrapped, adapter)
    with wrapped.disable_adapter():
        bare = _logits(wrapped, model.config)
    return _logits(wrapped, model.config), bare


def check_peft(adapter: Path, skeleton: Skeleton) -> dict[str, float]:
    """Whether PEFT has a place of the right shape for every tensor of an adapter; the figures.

    Raises:
        StorageUnavailable: It has not.
    """
    with torch.device("meta"):
        model = type(skeleton.model)(skeleton.model.config)
    wrapped = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(str(adapter)), low_cpu_mem_usage=True)
    num_tensors = check_peft_names(wrapped, adapter)
    shapes = {name: tensor.shape for name, tensor in peft.get_peft_model_state_dict(wrapped).items()}
    for name, tensor in peft.utils.load_peft_weights(str(adapter), device="cpu").items():
        if shapes[name] != tensor.shape:
            raise StorageUnavailable(f"PEFT has another shape for {name}; nothing of it was given out")
    return {"tensors": num_tensors}


def check_peft_names(wrapped: Any, adapter: Path) -> int:
    """Whether PEFT has put every tensor of an adapter's file somewhere; how many there are.

    Raises:
        StorageUnavailable: It has left some out, which it only warns of.
    """
    found = peft.utils.load_peft_weights(str(adapter), device="cpu")
    wanted = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    left_out = sorted(found.keys() ^ {name for name in wanted if ".base_layer.weight" not in name})
    if left_out:
        raise StorageUnavailable(f"PEFT does not read {left_out[0]} of what was written; nothing of it was given out")
    return len(found)


def what_is_meant(
    base: Path, adapter: Path, merged: MergedModel, weights: list[TrainedWeight], *, in_blocks: bool = False
) -> Meant:
    """Compute what an export has to come to; ``in_blocks``, in eight bits too.

    Raises:
        StorageUnavailable: Merging is not what PEFT computes.
    """
    tuned, bare = tuned_logits(base, adapter)
    gc.collect()
    model = _load(base)
    _untie(model, merged)
    parameters = dict(model.named_parameters())
    for weight in weights:
        parameters[weight.name].data += weight.update()
    difference = _apart(_logits(model, model.config), tuned)
    _check("the adapter's update, added to the weights,", difference)
    for weight in weights:
        parameters[weight.name].data = parameters[weight.name].data.to(merged.stored_dtype(weight)).float()
    stored = _logits(model, model.config)
    figures = {
        "effect": _typical(bare, tuned),
        "merging_difference": difference,
        "rounding_difference": _typical(stored, tuned),
        "same_choices": (stored.argmax(-1) == tuned.argmax(-1)).float().mean().item(),
    }
    digests = {name: _digest(tensor) for name, tensor in parameters.items()}
    if not in_blocks:
        return Meant(tuned, stored, digests, figures)
    for name, tensor in parameters.items():
        if quantized.takes_blocks(name, tensor.shape):
            tensor.data = quantized.out_of_blocks(tensor.data)
    figures[_IN_BLOCKS] = _typical(_logits(model, model.config), tuned)
    return Meant(tuned, stored, digests, figures, {name: _digest(tensor) for name, tensor in parameters.items()})


def check_merged(folder: Path, meant: Meant) -> dict[str, float]:
    """Whether transformers reads a folder as what was meant; the figures.

    Raises:
        StorageUnavailable: It does not.
    """
    model = _load(folder)
    _check_digests("transformers reads", dict(model.named_parameters()), meant.digests)
    difference = _apart(_logits(model, model.config), meant.stored)
    _check("what was written", difference)
    figures = {name: value for name, value in meant.figures.items() if name != _IN_BLOCKS}
    return {**figures, "logits_difference": difference, "tensors": len(meant.digests)}


def check_gguf(path: Path, skeleton: Skeleton, meant: Meant, *, in_blocks: bool = False) -> dict[str, float]:
    """Whether transformers' reader of GGUF finds in a file what was meant, perhaps in eight bits; the figures.

    Raises:
        StorageUnavailable: It does not.
    """
    reads: Any = load_gguf_checkpoint
    read = reads(str(path), return_tensors=True, model_to_load=skeleton.model)
    tensors = {name: tensor.float() for name, tensor in read["tensors"].items() if name != "rope_freqs.weight"}
    _check_digests("in GGUF there is", tensors, meant.digests_in_blocks if in_blocks else meant.digests)
    config = skeleton.model.config
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        if read["config"].get(name) != getattr(config, name):
            raise StorageUnavailable(f"GGUF says {name} is {read['config'].get(name)}; nothing of it was given out")
    figures = {name: value for name, value in meant.figures.items() if in_blocks or name != _IN_BLOCKS}
    return {**figures, "tensors": len(tensors)}


def check_gguf_adapter(path: Path, adapter: GgufAdapter, weights: list[TrainedWeight]) -> dict[str, float]:
    """Whether what llama.cpp multiplies out of a file's tensors is each weight's update; the figures.

    Raises:
        StorageUnavailable: It is not.
    """
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    alpha = float(reader.fields[gguf.Keys.Adapter.LORA_ALPHA].contents())
    largest, num_read = 0.0, 0
    for weight in weights:
        for name, update in adapter.updates_of(weight).items():
            a, b = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
            found = alpha / b.shape[-1] * (b @ a)
            largest = max(largest, float((found - update).norm() / update.norm().clamp_min(1e-30)))
            num_read += 2
    _check("the adapter in GGUF", largest)
    if num_read != len(tensors):
        raise StorageUnavailable(f"{path.name} holds {len(tensors)} tensors, not {num_read}; it was not given out")
    return {"tensors": num_read, "update_difference": largest}


def _untie(model: Any, merged: MergedModel) -> None:
    if merged.has_own_head:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        setattr(model.config, TIED, False)


def _check_digests(who: str, tensors: Mapping[str, torch.Tensor], meant: Mapping[str, str]) -> None:
    wrong = sorted(meant.keys() ^ tensors.keys())
    wrong += [name for name, tensor in tensors.items() if name not in wrong and _digest(tensor) != meant[name]]
    if wrong:
        raise StorageUnavailable(f"{who} another {wrong[0]} than was meant; nothing of it was given out")


def _check(what: str, difference: float) -> None:
    if not difference <= LIMIT:
        raise StorageUnavailable(
            f"{what} computes something else than the adapter: {difference:.2g} away, where {LIMIT:.0e} is allowed;"
            " nothing of it was given out"
        )


def _apart(found: torch.Tensor, meant: torch.Tensor) -> float:
    """Between the most unlike rows."""
    return _by_row(found, meant).max().item()


def _typical(found: torch.Tensor, meant: torch.Tensor) -> float:
    """Between the rows in the middle: rounding that sends a token to another expert makes much of a few."""
    return _by_row(found, meant).median().item()


def _by_row(found: torch.Tensor, meant: torch.Tensor) -> torch.Tensor:
    return (found - meant).pow(2).mean(-1).sqrt() / meant.pow(2).mean(-1).sqrt()


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor.float())).hexdigest()


def _logits(model: Any, config: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=probe_tokens(config.get_text_config().vocab_size)).logits[0]
    return logits.float()


def _load(folder: Path) -> Any:
    written = json.loads((folder / CONFIG_FILE).read_text())
    model, info = class_for(written).from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, trust_remote_code=False
    )
    problems = sorted(info["missing_keys"]) + sorted(str(name) for name in info["mismatched_keys"])
    if problems:
        raise StorageUnavailable(f"{problems[0]} cannot be read from {folder.name}; nothing of it was given out")
    return model.eval().requires_grad_(False)
