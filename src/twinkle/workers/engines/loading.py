"""A mesh's base model as its settings name it: loaded, probed, with its sampler, and what clients may ask of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from twinkle.core.adapter_sizes import SAMPLED_PART
from twinkle.core.errors import ConfigError, OutOfMemory, TwinkleError
from twinkle.core.mesh import WHOLE_MODEL, MeshCapabilities
from twinkle.core.settings import Settings
from twinkle.hub.model_path import resolve_model_id
from twinkle.infra.device_memory import DeviceMemory, free_bytes, unbounded
from twinkle.infra.platform import Platform
from twinkle.infra.rank_group import RankGroup
from twinkle.model.fused.core import LoraCore
from twinkle.model.fused.determinism import prepare_environment
from twinkle.model.fused.gradient_buffers import is_out_of_memory
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.step import OutOfStep
from twinkle.model.loading import decoder_of
from twinkle.model.whole.core import WholeModelCore
from twinkle.module.packed_linear import EightBits
from twinkle.sampler.none import NoSampler
from twinkle.sampler.probe import SamplerProbe
from twinkle.sampler.request import DecodeText
from twinkle.sampler.stepped import SteppedSampler
from twinkle.sampler.torch_sampler import SteppedTorchSampler
from twinkle.sampler.vllm.sampler import SteppedVLLMSampler
from twinkle.workers.engines.shares import (
    ADAPTERS,
    SEQUENCES,
    bound_by_base,
    limit_of,
    reserve_adapters,
    reserve_sequences,
)
from twinkle.workers.engines.threads import thread_limit
from twinkle.workers.engines.timed_passes import choose_threads

_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
_LONGEST_REASON = 300

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A base model ready to be trained on and sampled from."""

    model: LoraCore
    sampler: SteppedSampler
    capabilities: MeshCapabilities
    memory: DeviceMemory
    """Of this rank's device, and who holds what of it."""
    folder: str
    """Where it lies, its tokenizer beside it."""


def load_served(settings: Settings, ranks: RankGroup) -> ServedModel:
    """Load the base model that the settings name; on several ranks, this one's part in it.

    Raises:
        ConfigError: No model was named, or it cannot be loaded.
    """
    if not settings.model:
        raise ConfigError("TWINKLE_MODEL: a worker needs the path or id of a base model")
    prepare_environment()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = _device_of(settings, ranks)
    Platform.named(settings.device_type).require(device)
    folder = resolve_model_id(settings.model, field="TWINKLE_MODEL")
    packing = _packing_of(settings)
    memory = unbounded(torch.device(device))
    limit_bytes = limit_of(settings, torch.device(device), ranks)
    try:
        model = _load_model(settings, folder, device, ranks, memory, packing)
        tokenizer = _load_tokenizer(folder)
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"TWINKLE_MODEL: {settings.model} does not fit into the memory of {device}") from error
        if not _is_of_the_model(error):
            raise
        reason = str(error).strip().partition("\n")[0][:_LONGEST_REASON]
        raise ConfigError(f"TWINKLE_MODEL: {settings.model} cannot be loaded: {reason}") from error
    left = bound_by_base(memory, limit_bytes, model)
    if isinstance(model, WholeModelCore):
        memory.add(ADAPTERS, model.pool)
        return ServedModel(
            model=model,
            sampler=NoSampler(),
            capabilities=_of_whole_model(settings, model, folder, memory),
            memory=memory,
            folder=folder,
        )
    sampler: SteppedSampler = NoSampler()
    if isinstance(model, FusedLoraModel):
        decode_text = None if tokenizer is None else _decoder_of(tokenizer)
        sampler = _make_sampler(settings, model, memory, left, decode_text=decode_text)
    else:
        memory.add(ADAPTERS, model.pool)
    adapter_bytes = reserve_adapters(memory, settings)
    capabilities = MeshCapabilities(
        base_model=settings.resolved_model_name,
        architecture=model.info.architecture,
        vocab_size=model.info.vocab_size,
        max_context_length=model.info.max_context_length,
        max_rank=_largest_rank(settings, model, adapter_bytes),
        device=settings.device,
        determinism=model.determinism,
        sampler=settings.sampler,
        pictures=model.picture_rules,
        ranks=ranks.size,
        shard=settings.shard,
        threads=torch.get_num_threads(),
        tokenizer_path=_readable_tokenizer_path(folder),
        adapter_sizes=model.pool.sizes,
        adapter_bytes=adapter_bytes,
        quantisation=settings.quantisation,
        quantisation_error=0.0 if packing is None else packing.largest_error,
        memory_bytes=memory.limit_bytes or 0,
        memory_held=memory.held,
        serves="everything" if isinstance(model, FusedLoraModel) else "training",
        engine=settings.engine,
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        expert_parallel=settings.expert_parallel,
    )
    return ServedModel(model=model, sampler=sampler, capabilities=capabilities, memory=memory, folder=folder)


def _of_whole_model(settings: Settings, model: WholeModelCore, folder: str, memory: DeviceMemory) -> MeshCapabilities:
    return MeshCapabilities(
        base_model=settings.resolved_model_name,
        architecture=model.info.architecture,
        vocab_size=model.info.vocab_size,
        max_context_length=model.info.max_context_length,
        max_rank=0,
        device=settings.device,
        determinism=model.determinism,
        threads=torch.get_num_threads(),
        tokenizer_path=_readable_tokenizer_path(folder),
        memory_bytes=memory.limit_bytes or 0,
        memory_held=memory.held,
        serves=WHOLE_MODEL,
    )


def _largest_rank(settings: Settings, model: LoraCore, adapter_bytes: int) -> int:
    """Up to which adapters are taken: as the settings and the model say, and an adapter fits into their memory.

    Raises:
        ConfigError: Not even one of rank 1 does, into what the settings leave them.
        OutOfMemory: Nor into what the device has left.
    """
    wanted = min(settings.max_rank, model.info.max_rank)
    trained_bytes = int(adapter_bytes * (1 - SAMPLED_PART))
    fits = model.pool.sizes.largest_rank(trained_bytes)
    if fits < 1:
        reason = (
            f"TWINKLE_ADAPTER_BYTES: three quarters of {adapter_bytes} are not enough for an adapter of rank 1, which"
            f" takes {model.pool.sizes.rank_bytes}"
        )
        if settings.adapter_bytes:
            raise ConfigError(f"{reason}; raise it")
        raise OutOfMemory(f"{reason}, on {model.device} beside the base model; use a device with more memory")
    if fits < wanted:
        _log.warning(
            "worker.ranks_limited", largest=fits, wanted=wanted, adapter_bytes=adapter_bytes, setting="TWINKLE_MAX_RANK"
        )
    return min(wanted, fits)


def _load_model(
    settings: Settings, folder: str, device: str, ranks: RankGroup, memory: DeviceMemory, packing: EightBits | None
) -> LoraCore:
    dtype, tokens_per_pass = _DTYPES[settings.dtype], settings.tokens_per_pass or None
    if settings.engine == "megatron":
        # An extra, and slow to import.
        from twinkle.model.megatron.serving.core import ServedMegatronModel  # noqa: PLC0415

        if not settings.threads:
            torch.set_num_threads(thread_limit(ranks.size))
        # A device mesh knows its ranks by these, which torchrun sets where it starts them.
        number = ranks.rank if ranks.device_number is None else ranks.device_number
        os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size), "LOCAL_RANK": str(number)}
        return ServedMegatronModel(
            folder,
            name=settings.resolved_model_name,
            ranks=ranks,
            tp_size=settings.tensor_parallel,
            pp_size=settings.pipeline_parallel,
            ep_size=settings.expert_parallel,
            device_type=settings.device_type,
            dtype=dtype,
            tokens_per_pass=tokens_per_pass,
        )
    if settings.serves == WHOLE_MODEL:
        return WholeModelCore.from_pretrained(
            folder,
            name=settings.resolved_model_name,
            device=device,
            tokens_per_pass=tokens_per_pass,
            prepare=lambda model: None if settings.threads else choose_threads(model, ranks),
        )
    return FusedLoraModel.from_pretrained(
        folder,
        device=device,
        dtype=dtype,
        tokens_per_pass=tokens_per_pass,
        activation_bytes=settings.activation_bytes or None,
        memory=memory,
        ranks=ranks,
        shard=settings.shard == "fsdp",
        prepare=lambda model: None if settings.threads else choose_threads(model, ranks),
        picture_cache_bytes=settings.picture_cache_bytes,
        reduce=lambda model: (
            None if packing is None else packing.pack(decoder_of(model), name=settings.model or folder)
        ),
    )


def _packing_of(settings: Settings) -> EightBits | None:
    """What makes the base model's weights smaller, if anything does.

    Raises:
        ConfigError: torchao is missing, or another setting does not go with it.
    """
    if settings.quantisation == "none":
        return None
    others = {
        "TWINKLE_ENGINE": (settings.engine, "transformers"),
        "TWINKLE_SHARD": (settings.shard, "replicate"),
        "TWINKLE_SAMPLER": (settings.sampler, "torch"),
    }
    for name, (value, wanted) in others.items():
        if value != wanted:
            raise ConfigError(f"TWINKLE_QUANTISATION: {settings.quantisation} goes with {name}={wanted}, not {value}")
    if settings.serves == WHOLE_MODEL:
        raise ConfigError(f"TWINKLE_QUANTISATION: {WHOLE_MODEL} trains the base model's own weights; leave it at none")
    EightBits.check()
    return EightBits()


def _is_of_the_model(error: Exception) -> bool:
    """Whether an error at loading will come again, whoever tries, unlike one of the device or of the other ranks.

    transformers' classes are many, and what breaks in one that does not fit is of any type.
    """
    passes = (
        TwinkleError,
        OutOfStep,
        torch.OutOfMemoryError,
        torch.AcceleratorError,
        torch.distributed.DistError,
        MemoryError,
    )
    if isinstance(error, passes) or "allocate memory" in str(error):
        return False
    return not isinstance(error, ConnectionError | TimeoutError)


def _make_sampler(
    settings: Settings, model: FusedLoraModel, memory: DeviceMemory, left: int, *, decode_text: DecodeText | None
) -> SteppedSampler:
    if settings.sampler == "torch":
        SamplerProbe(model).check()
        room = reserve_sequences(memory, settings, model, left)
        if room.max_length < model.info.max_context_length:
            _log.warning(
                "worker.samples_limited",
                max_length=room.max_length,
                context=model.info.max_context_length,
                setting="TWINKLE_DEVICE_BYTES",
            )
        return SteppedTorchSampler(
            model,
            slots=settings.sample_slots,
            max_length=room.max_length,
            kv_tokens=room.kv_tokens,
            state_bytes=room.state_bytes,
            decode_text=decode_text,
            graphs=settings.sampler_graphs,
        )
    before = free_bytes(model.device)
    sampler = SteppedVLLMSampler(
        settings.model,
        device=settings.device,
        slots=settings.sample_slots,
        max_rank=min(settings.max_rank, model.info.max_rank),
        memory_fraction=settings.sampler_memory,
        decode_text=decode_text,
        never_drawn=() if model.picture_rules is None else model.picture_rules.all_tokens,
    )
    if model.device.type == "cuda":
        # vLLM has its weights and its cache from the start; on a CPU it says itself what they take.
        memory.fix(SEQUENCES, max(0, before - free_bytes(model.device)))
    return sampler


def _device_of(settings: Settings, ranks: RankGroup) -> str:
    """The device of one rank: as named when there is no other, else the one that bears its number."""
    if ranks.size == 1:
        return settings.device
    number = ranks.rank if ranks.device_number is None else ranks.device_number
    return Platform.named(settings.device).device_of(number)


def _load_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the model, if there is one that needs no code of the model's own.

    Without it, stop strings cannot be matched.
    """
    if Path(model).is_dir() and not (Path(model) / "tokenizer_config.json").exists():
        return None
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (ValueError, ImportError):
        if "AutoTokenizer" not in (get_tokenizer_config(model).get("auto_map") or ()):
            raise
        _log.warning("tokenizer.is_code", model=model, next="stop strings are refused; send stop tokens")
        return None


def _decoder_of(tokenizer: PreTrainedTokenizerBase) -> DecodeText:
    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids)))

    return decode


def _readable_tokenizer_path(model: str) -> str | None:
    """Where a client on the same machine finds the tokenizer. The SDK cuts paths of fewer than three slashes."""
    folder = Path(model).absolute()
    is_usable = (folder / "tokenizer.json").exists() and str(folder).count("/") >= 3
    return str(folder) if is_usable else None
