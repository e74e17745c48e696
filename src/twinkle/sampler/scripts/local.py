"""Samplers that a script makes from a model's id: on our own engine, or on vLLM where it is installed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from twinkle.core.errors import InvalidInput
from twinkle.core.keywords import known_keywords
from twinkle.core.process.events import event_log
from twinkle.hub.image_processor import load_image_processor, picture_rules
from twinkle.hub.model_path import resolve_model_id
from twinkle.hub.support import WITH_PICTURES
from twinkle.hub.trust import naming_code
from twinkle.infra import DeviceMesh
from twinkle.infra.remote import remote_function
from twinkle.infra.runtime import mesh_of
from twinkle.model.device_traits import plain_dtype
from twinkle.model.fused.determinism import prepare_environment
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.loading import load_base_model, stored_paths
from twinkle.model.placement import device_of
from twinkle.model.weight_files import stored_weights
from twinkle.plugin.patching import apply_patch
from twinkle.sampler.scripts.calls import SteppingSampler
from twinkle.sampler.stepped import SteppedSampler
from twinkle.sampler.torch_sampler import SteppedTorchSampler
from twinkle.sampler.vllm.sampler import SteppedVLLMSampler

DEFAULT_SLOTS = 32
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
VLLM = "vllm"

log = event_log()


class TorchSampler(SteppingSampler):
    """Samples on this project's own engine, in this process: on a CPU to the bit, whatever else is sampled beside it.

    Args:
        model_id: A directory or an id of a hub. Code that lies beside a model is never run.
        device_mesh: The global layout if omitted; tells the kind of device. Under torchrun a rank samples its own rows.
        torch_dtype: float32 on a CPU and bfloat16 elsewhere, if omitted.
        model_cls: The transformers class to load it with; the one of its config if omitted.
        max_length: Prompt and output together; the model's context if omitted.
        slots: Sequences served at once; further ones wait.
        remote_group: The group of devices on which it lives, with the whole model on every rank.
        settings: Others that scripts pass are named in the log and have no effect.
    """

    def __init__(
        self,
        model_id: str,
        device_mesh: DeviceMesh | None = None,
        torch_dtype: torch.dtype | str | None = None,
        trust_remote_code: bool | None = None,
        model_cls: Any = None,
        *,
        max_length: int | None = None,
        slots: int = DEFAULT_SLOTS,
        remote_group: str | None = None,
        **settings: Any,
    ) -> None:
        self.model_id = resolve_model_id(model_id)
        known_keywords("TorchSampler", settings, inspect.signature(TorchSampler).parameters)
        self._model = _load(self.model_id, device_of(mesh_of(device_mesh)), _dtype(torch_dtype), model_cls)
        tokenizer = _tokenizer(self.model_id)
        super().__init__(
            SteppedTorchSampler(self._model, slots=slots, max_length=max_length, decode_text=_decode_of(tokenizer)),
            tokenizer=tokenizer,
        )

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def load_full_weights_from_path(self, path: str | Path) -> None:
        """Take over the weights of a whole model that was saved; an adapter that was synced before is forgotten.

        Raises:
            ConfigError: There is no such folder.
            InvalidInput: There are no weights, some are missing, or they are another model's.
        """
        folder = Path(resolve_model_id(str(path), field="path"))
        weights = stored_weights(folder)
        missing = sorted(set(self._model.language_weights()) - {self._model.own_name(name) for name in weights})
        if missing:
            raise InvalidInput("path", f"{path} lacks {missing[0]}; it was saved from another model")
        self.receive_weights(weights.items())

    def apply_patch(self, patch_cls: Any, **settings: Any) -> None:
        """Change the model that samples by a patch; see ``twinkle.patch.apply_patch``."""
        apply_patch(self._model.module, patch_cls, **settings)
        self.reset_prefix_cache()


class VLLMSampler(SteppingSampler):
    """Samples with vLLM where it is installed, else with :class:`TorchSampler`, which a line in the log says.

    Both draw by the same rule: a seed means the same tokens wherever the logits are near enough.

    Args:
        model_id: A directory or an id of a hub.
        engine_args: vLLM's own; our own sampler goes by ``max_model_len``, ``max_num_seqs`` and ``dtype``.
        device_mesh: As for ``TorchSampler``.
        remote_group: As for ``TorchSampler``.
        settings: Others that scripts pass are named in the log and have no effect.
    """

    def __init__(
        self,
        model_id: str,
        engine_args: Mapping[str, Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        remote_group: str | None = None,
        **settings: Any,
    ) -> None:
        known_keywords("vLLMSampler", settings, inspect.signature(VLLMSampler).parameters)
        self.model_id = resolve_model_id(model_id)
        arguments = dict(engine_args or {})
        self._own: TorchSampler | None = None
        if find_spec(VLLM) is None:
            _say_once("vLLM is not installed (pip install 'twinkle-queue[vllm]'): sampling on our own engine")
            self._own = TorchSampler(
                self.model_id,
                device_mesh,
                arguments.get("dtype"),
                max_length=arguments.get("max_model_len"),
                slots=arguments.get("max_num_seqs", DEFAULT_SLOTS),
            )
            super().__init__(self._own.stepped, tokenizer=self._own.tokenizer)
            return
        self.takes_whole_weights = False
        tokenizer = _tokenizer(self.model_id)
        super().__init__(
            _start_vllm(self.model_id, arguments, device_of(mesh_of(device_mesh)), tokenizer), tokenizer=tokenizer
        )

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def load_full_weights_from_path(self, path: str | Path) -> None:
        """Sample with a whole model that was saved.

        Raises:
            InvalidInput: There is no such model, or vLLM runs, whose weights stay those it was started with.
        """
        if self._own is None:
            raise InvalidInput("path", "cannot be loaded into vLLM once it runs; make a sampler with it as model_id")
        self._own.load_full_weights_from_path(path)
        self._adapters.forget_synced()

    def apply_patch(self, patch_cls: Any, **settings: Any) -> None:
        """As ``TorchSampler``; vLLM's own model takes none."""
        if self._own is None:
            super().apply_patch(patch_cls, **settings)
        else:
            self._own.apply_patch(patch_cls, **settings)


def _start_vllm(model: str, arguments: dict[str, Any], device: torch.device, tokenizer: Any) -> SteppedSampler:
    max_rank = arguments.pop("max_lora_rank", None)
    return SteppedVLLMSampler(
        model,
        {name: value for name, value in arguments.items() if name not in ("max_num_seqs", "max_model_len")},
        device=str(device),
        slots=arguments.get("max_num_seqs", DEFAULT_SLOTS),
        max_length=arguments.get("max_model_len"),
        decode_text=_decode_of(tokenizer),
        never_drawn=_places_of_pictures(model),
        **({} if max_rank is None else {"max_rank": max_rank}),
    )


def _places_of_pictures(model: str) -> tuple[int, ...]:
    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
    processor = load_image_processor(model) if config.model_type in WITH_PICTURES else None
    return () if processor is None else picture_rules(config, processor).all_tokens


def _load(path: str, device: torch.device, dtype: torch.dtype | None, model_cls: Any) -> FusedLoraModel:
    prepare_environment()
    wanted = dtype or plain_dtype(device.type)
    model: Any
    if model_cls is None or model_cls is transformers.AutoModelForCausalLM:
        model = load_base_model(path, name=path, dtype=wanted)
    else:
        loader = getattr(transformers, model_cls, None) if isinstance(model_cls, str) else model_cls
        if loader is None:
            raise InvalidInput("model_cls", f"is {model_cls!r}, which transformers does not have")
        with naming_code(path):
            model = loader.from_pretrained(path, dtype=wanted, trust_remote_code=False)
    return FusedLoraModel(
        model.to(device),
        name=path,
        image_processor=load_image_processor(path) if model.config.model_type in WITH_PICTURES else None,
        paths=stored_paths(path),
    )


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    if given is None or given == "auto":
        return None
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput("torch_dtype", f"is {given!r}; send a torch dtype or the name of one")
    return dtype


def _tokenizer(path: str) -> Any:
    """The tokenizer beside a model; None where there is none, and then only token ids come back."""
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    with naming_code(path):
        return transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=folder.is_dir(), trust_remote_code=False
        )


def _decode_of(tokenizer: Any) -> Any:
    """Stop strings are looked for in the text with its special tokens."""
    return None if tokenizer is None else lambda tokens: str(tokenizer.decode(list(tokens)))


@cache
def _say_once(message: str) -> None:
    log.info("sampler.chosen", reason=message)
