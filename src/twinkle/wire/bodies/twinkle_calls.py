"""Bodies of the Twinkle dialect's calls: of models' methods, tickets, and answers that are not a result's."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field

from twinkle.core.names import plain_name
from twinkle.wire.bodies.base import MAX_TTL_S, Identifier, RequestBody, ResponseBody, Text, TtlSeconds
from twinkle.wire.bodies.futures import QueueState
from twinkle.wire.bodies.jobs_export import Secret
from twinkle.wire.bodies.twinkle import TwinkleBody

MAX_ADAPTER_NAME = 128
MAX_ACCUMULATION = 65_536
MAX_CONFIG_CHARS = 64 * 1024
MAX_SAMPLES = 2**53
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _plain_name(name: str) -> str:
    if ".." in name or name.startswith(("/", "~")) or ":" in name or _CONTROL.search(name):
        raise ValueError("must not begin with '/' or '~' nor hold '..', ':' or control characters")
    return plain_name(name)


AdapterText = Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME), AfterValidator(_plain_name)]


class MethodCall(RequestBody):
    """A call of a method of the model. Whatever else it holds are the method's own arguments."""

    model_config = ConfigDict(extra="allow")

    adapter_name: Identifier = Field(description="as given to add_adapter_to_model or answered by it, or a run's id")


class OpenModelRequest(RequestBody):
    """``create``: nothing need be said."""


class AddAdapterRequest(RequestBody):
    """``add_adapter_to_model``."""

    adapter_name: AdapterText
    config: Annotated[str, Field(max_length=MAX_CONFIG_CHARS)] | dict[str, Any] | None = Field(
        default=None,
        description="a LoRA config, as an object or as its JSON text; null: all of the model's weights are trained",
    )
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=MAX_ACCUMULATION)
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="of the first weights; drawn if it is left out")
    is_trainable: bool = True
    save_dir: Text | None = Field(default=None, description="taken and not used: checkpoints are kept in the store")


class RemoveAdapterRequest(RequestBody):
    """``remove_adapter``."""

    adapter_name: Identifier = Field(description="as given to add_adapter_to_model or answered by it, or a run's id")


class SaveRequest(RequestBody):
    """``save``."""

    adapter_name: Identifier
    name: Text | None = Field(default=None, description="foreign characters become '_'; default: by number")
    save_optimizer: bool = False
    is_sampler: bool = False
    consumed_train_samples: int = Field(default=0, ge=0, le=MAX_SAMPLES)
    ttl_s: TtlSeconds | None = Field(default=None, description=f"how long it is kept, at most {MAX_TTL_S}")
    output_dir: Text | None = Field(default=None, description="of scripts that run at home; refused here")


class LoadRequest(RequestBody):
    """``load`` and ``resume_from_checkpoint``."""

    adapter_name: Identifier
    name: Text = Field(
        description="twinkle://<run>/weights/<name>, the name of one of the run's own checkpoints, or the path of a"
        " folder that the operator has opened"
    )
    load_optimizer: bool = False
    resume_only_model: bool = False


class SavedCheckpoint(RequestBody):
    """What ``save`` answers, given back."""

    twinkle_path: Text


class UploadRequest(RequestBody):
    """``upload_to_hub``."""

    checkpoint_dir: Text | SavedCheckpoint
    hub_model_id: Text = Field(description="owner/name, with ms:// (the default) or hf:// before it")
    hub_token: Secret | None = Field(default=None, description="what opens the hub; kept sealed, never shown again")
    private: bool = True


class CallTicket(ResponseBody):
    """A call was accepted and is under way; sent with status 202."""

    request_id: str


class PendingCall(ResponseBody):
    """A call is still under way; sent with status 202."""

    request_id: str
    queue_state: QueueState
    queue_state_reason: str | None = None


class ModelOpened(ResponseBody):
    """The model is served."""

    status: Literal["ok"] = "ok"


class AdapterCreated(ResponseBody):
    """An adapter was made."""

    status: Literal["ok"] = "ok"
    adapter_name: str
    training_run_id: str
    warnings: list[str] | None = None
    """What of its config is not applied."""


class AdapterRemoved(ResponseBody):
    """An adapter has ended, behind everything that was called on it before; its checkpoints stay."""

    status: Literal["ok"] = "ok"
    training_run_id: str


class SavedResponse(ResponseBody):
    """Where a checkpoint is: the same path twice, since there is no folder of the client's or the server's."""

    twinkle_path: str
    checkpoint_dir: str


class UploadTicket(ResponseBody):
    """An upload was taken on; its id is the job's."""

    request_id: str


UploadState: TypeAlias = Literal["pending", "running", "completed", "failed"]


class UploadStatus(TwinkleBody):
    """How an upload stands."""

    request_id: str
    status: UploadState
    error: str | None = None
