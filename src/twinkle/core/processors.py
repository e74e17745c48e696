"""Processors: data sets, loaders and their like that a client of the Twinkle dialect has here and calls by name.

What a client may have, and what it may call, is listed here and nowhere else: a class, a method or an argument that is
not in these tables is refused before anything is stored, so no name that a client sends is ever looked up in our code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from twinkle.core.errors import InvalidInput

PROCESSORS_MESH = "processors"
"""The mesh of their lanes. It serves no model."""

PROCESSOR_PREFIX = "pid:"
FILE_PREFIX = "file-"

MAX_BATCH_ROWS = 8192
"""Rows of one batch, and of one call."""
MAX_ROWS = 2_000_000
"""Rows of one data set."""
MAX_ANSWER_BYTES = 64 * 2**20
"""One answer, as JSON."""
MAX_SOURCE_BYTES = 4 * 2**30
"""One file that a data set is made of."""
MAX_CALLS = 256
"""Calls that change what a processor is: so many are done again when it has to be rebuilt."""

CREATE = "create"
EXHAUSTED = "Iterator exhausted"

_ID = re.compile(r"pid:[0-9a-f]{32}")


class Effect(StrEnum):
    """What a call does to its processor."""

    CHANGES = "changes"
    """It is done again whenever the processor is rebuilt."""
    MOVES = "moves"
    """It moves an iterator, whose position is kept."""
    ASKS = "asks"


@dataclass(frozen=True)
class Method:
    """One that may be called, and the arguments it takes."""

    effect: Effect
    takes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Offer:
    """A class that a processor may be of: the arguments it is made with, and its methods."""

    takes: frozenset[str] = frozenset()
    methods: Mapping[str, Method] = field(default_factory=dict)


WITHOUT_EFFECT = frozenset(
    {
        "batched",
        "desc",
        "device_mesh",
        "instance_id",
        "keep_in_memory",
        "load_from_cache_file",
        "num_proc",
        "num_workers",
        "packing_num_proc",
        "persistent_workers",
        "phase",
        "pin_memory",
        "prefetch_factor",
        "remote_group",
        "timeout",
        "trust_remote_code",
        "writer_batch_size",
    }
)
"""Arguments that say how fast, how visibly or where something is done, which a server decides: they change no row."""

REFERENCES = frozenset({"dataset", "filter_func", "preprocess_func", "processor_cls", "template_cls", "template_func"})
"""Arguments that may name another processor of the same tenant by its id."""


def _changes(*takes: str) -> Method:
    return Method(Effect.CHANGES, frozenset(takes))


def _moves(*takes: str) -> Method:
    return Method(Effect.MOVES, frozenset(takes))


def _asks(*takes: str) -> Method:
    return Method(Effect.ASKS, frozenset(takes))


_TEMPLATE = (
    "model_id",
    "use_chat_template",
    "max_length",
    "truncation_strategy",
    "default_system",
    "enable_thinking",
    "revision",
)
_META = ("dataset_meta", "revision", "skip_unreadable", "streaming")

_ROWS: Mapping[str, Method] = {
    "add_dataset": _changes(*_META),
    "set_template": _changes("template_func", "template_cls", *_TEMPLATE),
    "map": _changes("preprocess_func", "dataset_meta", "init_args", "remove_columns", "batch_size"),
    "filter": _changes("filter_func", "dataset_meta", "init_args", "batch_size"),
    "mix_dataset": _changes("interleave"),
    "encode": _changes("add_generation_prompt", "batch_size"),
    "check": _changes("batch_size"),
    "cast_column": _changes("column", "decode"),
    "__iter__": _moves(),
    "__next__": _moves(),
}
_BY_NUMBER: Mapping[str, Method] = {**_ROWS, "__len__": _asks(), "__getitem__": _asks("idx", "index")}
_LOADER: Mapping[str, Method] = {
    "set_processor": _changes("processor_cls", "padding_side", "padding_free", "framework"),
    "__len__": _asks(),
    "__iter__": _moves(),
    "__next__": _moves(),
    "get_state": _asks(),
    "resume_from_checkpoint": _moves("consumed_train_samples"),
    "skip_consumed_samples": _moves("consumed_train_samples"),
}
_CONVERSATIONS: Mapping[str, Method] = {
    "encode": _asks("trajectory", "add_generation_prompt"),
    "batch_encode": _asks("batch", "add_generation_prompt"),
    "check": _asks("trajectory"),
    "batch_check": _asks("batch"),
    "format_trajectory": _asks("trajectory", "add_generation_prompt"),
    "decode": _asks("token_ids", "skip_special_tokens"),
    "batch_decode": _asks("token_ids", "skip_special_tokens"),
}
_PACK = {"pack_dataset": _changes()}


def _preprocessor(*takes: str) -> Offer:
    return Offer(frozenset(takes), {"__call__": _asks("rows")})


def _reward(*takes: str) -> Offer:
    return Offer(frozenset(takes), {"__call__": _asks("trajectories", "ground_truths")})


OFFERS: Mapping[str, Mapping[str, Offer]] = MappingProxyType(
    {
        "dataset": {
            "Dataset": Offer(frozenset(_META), _BY_NUMBER),
            "LazyDataset": Offer(frozenset(_META), _BY_NUMBER),
            "PackingDataset": Offer(frozenset(_META), {**_BY_NUMBER, **_PACK}),
            "IterableDataset": Offer(frozenset(_META), _ROWS),
            "IterablePackingDataset": Offer(frozenset({*_META, "packing_interval", "cyclic"}), {**_ROWS, **_PACK}),
        },
        "dataloader": {
            "DataLoader": Offer(
                frozenset({"dataset", "batch_size", "min_batch_size", "max_retries", "shuffle", "seed", "drop_last"}),
                _LOADER,
            )
        },
        "preprocessor": {
            "AlpacaProcessor": _preprocessor(),
            "CLEVRProcessor": _preprocessor("system"),
            "CompetitionMathGRPOProcessor": _preprocessor(),
            "CompetitionMathProcessor": _preprocessor(),
            "CountdownProcessor": _preprocessor(),
            "EmojiDPOProcessor": _preprocessor("system", "chosen_key", "rejected_key", "prompt_key"),
            "GSM8KProcessor": _preprocessor("system", "add_assistant"),
            "OlympiadBenchProcessor": _preprocessor("system", "language"),
            "SelfCognitionProcessor": _preprocessor("model_name", "model_author"),
        },
        "processor": {
            "InputProcessor": Offer(
                frozenset({"padding_free", "framework", "padding_side"}), {"__call__": _asks("inputs")}
            )
        },
        "reward": {
            "ArithmeticReward": _reward(),
            "FormatReward": _reward(),
            "GSM8KAccuracyReward": _reward(),
            "GSM8KFormatReward": _reward(),
            "MathReward": _reward("ground_truth_key"),
            "MultiModalAccuracyReward": _reward(),
            "OlympiadBenchAccuracyReward": _reward(),
            "OlympiadBenchFormatReward": _reward(),
            "OlympiadBenchQualityReward": _reward(),
        },
        "template": {
            name: Offer(frozenset(_TEMPLATE), _CONVERSATIONS)
            for name in ("DeepseekV4Template", "Gemma4Template", "Qwen2_5VLTemplate", "Qwen3_5Template", "Template")
        },
    }
)
"""By type and class."""

_ELSEWHERE = MappingProxyType(
    {
        "save_as": "writes to a disk, and this one is the server's; take the rows and write them where you are",
        "flush_save": "ends what save_as began, which is not offered here",
    }
)


def is_processor_id(text: object) -> bool:
    """Whether a value is an id as ``create`` answers them."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def offer_of(processor_type: object, class_type: object) -> Offer:
    """What a class of a type may be made with and called.

    Raises:
        InvalidInput: There is no such type, or none of its classes has that name.
    """
    if not isinstance(processor_type, str) or processor_type not in OFFERS:
        raise InvalidInput("processor_type", f"must be one of {', '.join(OFFERS)}")
    classes = OFFERS[processor_type]
    if not isinstance(class_type, str) or class_type not in classes:
        raise InvalidInput(
            "class_type",
            f"must be one of {', '.join(classes)}; code of a client's own is never run here",
        )
    return classes[class_type]


def method_of(offer: Offer, function: object) -> Method:
    """One of a class's methods.

    Raises:
        InvalidInput: It is none that may be called.
    """
    if isinstance(function, str) and function in offer.methods:
        return offer.methods[function]
    if isinstance(function, str) and function in _ELSEWHERE:
        raise InvalidInput("function", f"{function} {_ELSEWHERE[function]}")
    raise InvalidInput("function", f"must be one of {', '.join(offer.methods)}")


def accepted_arguments(arguments: Mapping[str, object], takes: frozenset[str]) -> dict[str, object]:
    """The arguments of a call without those that have no effect here.

    Raises:
        InvalidInput: One of them is not taken.
    """
    for name in arguments:
        if name not in takes and name not in WITHOUT_EFFECT:
            known = ", ".join(sorted(takes)) or "none"
            raise InvalidInput(name[:100], f"is no argument of this call; known here: {known}")
    return {name: value for name, value in arguments.items() if name in takes}
