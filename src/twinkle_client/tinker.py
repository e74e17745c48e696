"""The official Tinker SDK on a Twinkle server: any key, both schemes of paths, rows of our templates."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tinker

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where `twinkle-server` listens unless it is told otherwise."""
ANY_KEY = "EMPTY_TOKEN"
"""What is sent where nothing is given, to servers that take any key."""

_SDK_PREFIX = "tml-"
_IGNORED_LABEL = -100
_PATCHES, _GRIDS, _KINDS = "pixel_values", "image_grid_thw", "mm_token_type_ids"
_PATCHED = "_twinkle_was_here"


def init_tinker_client(base_url: str | None = None, api_key: str | None = None, **options: Any) -> None:
    """Make ``tinker.ServiceClient()`` talk to a Twinkle server from now on, in this process and its children.

    The SDK's own environment variables are set, from the arguments, else from ``TWINKLE_SERVER_URL`` and
    ``TWINKLE_SERVER_TOKEN``, else to a server on this machine; and see :func:`take_any_key`.

    Args:
        base_url: For example ``http://127.0.0.1:8000``.
        api_key: A key of that server; without one ``EMPTY_TOKEN``, which a server started with ``--any-key`` takes.
        options: Others' clients take any and use none; neither does this one, but it says so.
    """
    if options:
        warnings.warn(f"{', '.join(options)}: init_tinker_client has no use for it", stacklevel=2)
    url = base_url or os.environ.get("TWINKLE_SERVER_URL") or os.environ.get("TINKER_BASE_URL") or DEFAULT_URL
    key = api_key or os.environ.get("TWINKLE_SERVER_TOKEN") or os.environ.get("TINKER_API_KEY") or ANY_KEY
    os.environ["TINKER_BASE_URL"] = url.rstrip("/")
    os.environ["TINKER_API_KEY"] = key
    take_any_key()


def init_tinker_compat_client(
    base_url: str | None = None, api_key: str | None = None, **options: Any
) -> tinker.ServiceClient:
    """The same, and a ``tinker.ServiceClient`` of it; ``options`` are its own.

    Raises:
        ModuleNotFoundError: The SDK is not installed.
    """
    init_tinker_client(base_url=base_url, api_key=api_key)
    client: tinker.ServiceClient = importlib.import_module("tinker").ServiceClient(
        base_url=os.environ["TINKER_BASE_URL"], api_key=os.environ["TINKER_API_KEY"], **options
    )
    return client


def take_any_key() -> None:
    """Let the SDK of this process send keys without its prefix, read ``twinkle://``, and train whole models.

    Which keys are right is the server's to say: hosted services' have another form. Doing it twice is doing it once;
    without the SDK nothing happens.
    """
    try:
        parsed = importlib.import_module("tinker.types.checkpoint").ParsedCheckpointTinkerPath
        holder = importlib.import_module("tinker.lib.internal_client_holder").InternalClientHolder
        judge, kept_as = _judge_of_keys()
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("tinker"):
            raise
        # No SDK, or one too old for this server.
        return
    if getattr(judge, _PATCHED, False):
        return
    setattr(judge, _PATCHED, True)
    begin = judge.__init__

    @functools.wraps(begin)
    def take(self: Any, api_key: str | None = None, **others: Any) -> None:
        # Up to 0.29 what is not given is looked for here, from 0.30 on by the caller.
        given = api_key or os.environ.get("TINKER_API_KEY", "")
        is_judged = not given or given.startswith((_SDK_PREFIX, "eyJ"))
        begin(self, api_key=given if is_judged else _SDK_PREFIX + given, **others)
        setattr(self, kept_as, given)

    judge.__init__ = take
    read = parsed.from_tinker_path

    def from_tinker_path(cls: type, tinker_path: str) -> Any:
        return read(_in_the_sdks_scheme(tinker_path))

    parsed.from_tinker_path = classmethod(from_tinker_path)
    open_session = holder._create_sampling_session

    @functools.wraps(open_session)
    async def open_by_either_scheme(self: Any, model_path: str | None = None, base_model: str | None = None) -> Any:
        return await open_session(self, model_path and _in_the_sdks_scheme(model_path), base_model)

    holder._create_sampling_session = open_by_either_scheme
    service = importlib.import_module("tinker").ServiceClient
    service.create_full_training_client = _train_whole_model
    service.create_full_training_client_async = _train_whole_model_later


def input_feature_to_datum(input_feature: Mapping[str, Any]) -> tinker.Datum:
    """A row of a template as the SDK sends it: every token predicts its label, those that are ignored weigh nothing.

    Args:
        input_feature: ``input_ids`` (N,), ``labels`` (N,), the label of a token being the next one or -100; with an
            ``attention_mask`` (N,) what it leaves out is left out. Pictures go along as ``pixel_values`` (P, ...) and
            ``image_grid_thw`` (B, 3).

    Raises:
        ValueError: Something is missing, lengths differ, pictures are of a kind that does not travel, or the row is
            packed: a datum is one sequence.
    """
    types = importlib.import_module("tinker").types
    rows = {name: [int(value) for value in _column(input_feature, name)] for name in ("input_ids", "labels")}
    mask = input_feature.get("attention_mask")
    kept = [True] * len(rows["input_ids"]) if mask is None else [bool(value) for value in _flat(mask)]
    if not len(rows["input_ids"]) == len(rows["labels"]) == len(kept):
        lengths = f"{len(rows['input_ids'])} input_ids, {len(rows['labels'])} labels, {len(kept)} in attention_mask"
        raise ValueError(f"input_feature: {lengths}; they must be as many")
    tokens, labels = ([value for value, keep in zip(row, kept, strict=True) if keep] for row in rows.values())
    _refuse_packed(input_feature, kept)
    datum: tinker.Datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": _tensor(types, [max(label, 0) for label in labels], "int64"),
            "weights": _tensor(types, [float(label != _IGNORED_LABEL) for label in labels], "float32"),
            **_pictures(types, input_feature),
        },
    )
    return datum


def _judge_of_keys() -> tuple[Any, str]:
    """The SDK's class that refuses keys of another form, and its attribute that is sent."""
    try:
        return importlib.import_module("tinker.lib._auth_token_provider").ApiKeyAuthProvider, "_token"
    except ModuleNotFoundError as error:
        if error.name != "tinker.lib._auth_token_provider":
            raise
    # Up to 0.16.
    return importlib.import_module("tinker._client").AsyncTinker, "api_key"


def _refuse_packed(row: Mapping[str, Any], kept: Sequence[bool]) -> None:
    advice = "a datum is one; make one of each row before it is packed"
    if len(row.get("member_lengths") or ()) > 1:
        raise ValueError(f"input_feature.member_lengths: are of {len(row['member_lengths'])} sequences, {advice}")
    positions = np.asarray([] if row.get("position_ids") is None else row["position_ids"])
    if positions.size == len(kept) and (positions.reshape(-1)[np.asarray(kept, dtype=bool)][1:] == 0).any():
        raise ValueError(f"input_feature.position_ids: begin again, so of several sequences, {advice}")


def _pictures(types: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: np.asarray(row[name]) for name in (_PATCHES, _GRIDS, _KINDS) if row.get(name) is not None}
    if given.keys().isdisjoint((_PATCHES, _GRIDS)):
        return {}
    if row.get("image_position_ids") is not None:
        raise ValueError(f"input_feature.image_position_ids: do not travel; send pictures with {_GRIDS}")
    mask = row.get("attention_mask")
    if mask is not None and _KINDS in given:
        given[_KINDS] = given[_KINDS].reshape(-1)[np.asarray(_flat(mask), dtype=bool)]
    return {
        name: types.TensorData(
            data=values.reshape(-1).tolist(), dtype="float32" if name == _PATCHES else "int64", shape=list(values.shape)
        )
        for name, values in given.items()
    }


def _train_whole_model(self: Any, base_model: str, **options: Any) -> Any:
    """``ServiceClient.create_full_training_client``, which newer upstreams add: no LoRA is one of rank 0."""
    return self.create_lora_training_client(base_model, rank=0, **options)


async def _train_whole_model_later(self: Any, base_model: str, **options: Any) -> Any:
    return await self.create_lora_training_client_async(base_model, rank=0, **options)


def _column(row: Mapping[str, Any], name: str) -> Sequence[Any]:
    if row.get(name) is None:
        raise ValueError(f"input_feature.{name}: is missing; encode the row with a template first")
    return _flat(row[name])


def _flat(values: Any) -> Sequence[Any]:
    flat: Sequence[Any] = values.reshape(-1).tolist() if hasattr(values, "reshape") else values
    return flat


def _tensor(types: Any, values: list[Any], dtype: str) -> Any:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])


def _in_the_sdks_scheme(path: str) -> str:
    return "tinker://" + path.removeprefix("twinkle://") if path.startswith("twinkle://") else path
