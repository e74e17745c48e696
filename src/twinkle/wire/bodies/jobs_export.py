"""What an export is asked for: kind ``export``."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from twinkle.core.errors import InvalidInput
from twinkle.core.model_names import HUB_SCHEMES
from twinkle.wire.bodies.base import MAX_TTL_S, Identifier, Text
from twinkle.wire.bodies.jobs_base import JobPart, JobSpec
from twinkle.wire.paths import parse_checkpoint_path

ExportForm: TypeAlias = Literal["peft", "merged", "gguf", "gguf-q8_0", "gguf-adapter", "ollama"]
DEFAULT_KEEP_S = 7 * 24 * 3600
HUBS = HUB_SCHEMES
BUCKETS = ("s3://", "az://")
FOLDER = "file://"


def _checkpoint(path: str) -> str:
    try:
        parse_checkpoint_path(path)
    except InvalidInput as error:
        raise ValueError(error.message.partition(": ")[2]) from None
    return path


def _target(url: str) -> str:
    scheme, _, rest = url.partition("://")
    if scheme == "gs":
        raise ValueError("gs:// is not offered: nothing here was ever exported to it; take one of s3:// and az://")
    if not url.startswith((*HUBS, *BUCKETS, FOLDER)):
        raise ValueError(f"must begin with one of {', '.join((*HUBS, *BUCKETS, FOLDER))}")
    parts = rest.removeprefix("/").split("/") if scheme == "file" else rest.split("/")
    if any(part in ("", ".", "..") for part in parts) or "@" in parts[0] or "?" in rest or "#" in rest:
        raise ValueError("must be a plain address: no empty parts, no '..', no user, no query")
    if url.startswith(HUBS) and len(parts) != 2:
        raise ValueError(f"must name owner and repository, like {scheme}://owner/name")
    return url


CheckpointPath = Annotated[Identifier, AfterValidator(_checkpoint)]
Target = Annotated[Text, AfterValidator(_target)]
Secret = Annotated[str, Field(min_length=1, max_length=8192)]


class BucketCredentials(JobPart):
    """The tenant's own key for a bucket; the secret parts are kept sealed and never shown again."""

    access_key_id: Identifier
    secret_access_key: Secret
    session_token: Secret | None = None
    region: Identifier | None = None


class ExportSpec(JobSpec):
    """A checkpoint in the forms of other tools, read back and compared before it is given out."""

    checkpoint: CheckpointPath = Field(description="tinker://...; what it means when the job begins is exported")
    forms: list[ExportForm] = Field(
        default=["peft"],
        min_length=1,
        description="peft: the adapter's folder; merged: a folder of the whole model for transformers and vLLM; gguf,"
        " gguf-q8_0 (in eight bits), gguf-adapter: for llama.cpp; ollama: gguf with a Modelfile",
    )
    to: Target | None = Field(
        default=None,
        description="hf://owner/name, ms://owner/name, s3://bucket/prefix, az://container/prefix or"
        " file:///folder, where the operator allows it; default: files to download",
    )
    private: bool = Field(default=True, description="whether a repository of a hub made for it is hidden from others")
    hub_token: Secret | None = Field(default=None, description="what opens the hub; kept sealed, never shown again")
    credentials: BucketCredentials | None = Field(default=None, description="the key for a bucket of your own")
    verify: Literal["logits", "files"] = Field(
        default="logits", description="files: for models too large to be computed with where jobs run"
    )
    title: Text | None = Field(default=None, description="what the model is called in its card and in GGUF")
    keep_s: float = Field(default=DEFAULT_KEEP_S, gt=0, le=MAX_TTL_S, description="how long files to download are kept")

    @model_validator(mode="after")
    def _fits_its_target(self) -> Self:
        if len(set(self.forms)) < len(self.forms):
            raise ValueError("names a form twice")
        is_hub = self.to is not None and self.to.startswith(HUBS)
        if is_hub and len(self.forms) > 1:
            raise ValueError("a repository of a hub takes one form; submit a job for each")
        if is_hub and self.hub_token is None:
            raise ValueError("needs hub_token: the service has none of its own for you")
        if self.hub_token is not None and not is_hub:
            raise ValueError("has a hub_token, and no hub that it is for")
        if self.credentials is not None and not (self.to or "").startswith("s3://"):
            raise ValueError("has credentials, which are for s3:// alone")
        return self
