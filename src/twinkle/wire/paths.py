"""The identifiers that carry meaning: ``tinker://`` paths, ids of models, sampling sessions and custom losses.

The SDK builds some of these itself, so their form is part of the contract.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from twinkle.core.errors import InvalidInput

Segment: TypeAlias = Literal["weights", "sampler_weights", "external_weights"]

SCHEME = "tinker://"
OTHER_SCHEME = "twinkle://"
"""Of the Twinkle dialect: both name the same checkpoints, and each dialect answers with its own."""
MAX_NAME_LENGTH = 255
MAX_ID_LENGTH = 255

_NAME = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_RUN_ID = re.compile(r"[A-Za-z0-9._:-]+", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


@dataclass(frozen=True)
class CheckpointPath:
    """``tinker://<run_id>/<segment>/<name>``."""

    run_id: str
    segment: Segment
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.segment}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """How the REST routes call it within its run."""
        return f"{self.segment}/{self.name}"


@dataclass(frozen=True)
class ModelId:
    """``<session_id>:train:<model_seq_id>``; also called a training run's id."""

    session_id: str
    model_seq_id: int

    def __str__(self) -> str:
        return f"{self.session_id}:train:{self.model_seq_id}"


@dataclass(frozen=True)
class SamplingSessionId:
    """``<session_id>:sample:<sampling_session_seq_id>``."""

    session_id: str
    sampling_session_seq_id: int

    def __str__(self) -> str:
        return f"{self.session_id}:sample:{self.sampling_session_seq_id}"


@dataclass(frozen=True)
class CustomLossId:
    """``<session_id>:loss:<custom_loss_seq_id>``."""

    session_id: str
    custom_loss_seq_id: int

    def __str__(self) -> str:
        return f"{self.session_id}:loss:{self.custom_loss_seq_id}"

    @property
    def lane(self) -> str:
        """Where the journal numbers the losses of the session."""
        return f"{self.session_id}:loss"


def in_one_scheme(text: str) -> str:
    """A checkpoint's path as we write it, in whichever dialect it came; any other text as it is."""
    return SCHEME + text.removeprefix(OTHER_SCHEME) if text.startswith(OTHER_SCHEME) else text


def in_other_scheme(text: str) -> str:
    """A checkpoint's path as the Twinkle dialect writes it."""
    return OTHER_SCHEME + in_one_scheme(text).removeprefix(SCHEME)


def parse_checkpoint_path(text: str, *, field: str = "path") -> CheckpointPath:
    """Reads a complete checkpoint path, in either dialect."""
    text = in_one_scheme(text)
    if not text.startswith(SCHEME):
        raise InvalidInput(field, f"must begin with {SCHEME}, like tinker://<run>/weights/<name>")
    parts = text.removeprefix(SCHEME).split("/")
    if len(parts) != 3:
        raise InvalidInput(field, f"must have exactly three segments after {SCHEME}: run, kind and name")
    run_id, segment, name = parts
    if not _RUN_ID.fullmatch(run_id) or len(run_id) > MAX_ID_LENGTH or ".." in run_id:
        raise InvalidInput(field, "does not name a valid training run")
    return CheckpointPath(run_id, parse_segment(segment, field=field), validate_name(name, field=field))


def parse_segment(text: str, *, field: str = "path") -> Segment:
    """Reads the kind of a checkpoint."""
    if text not in get_args(Segment):
        raise InvalidInput(field, f"the kind of checkpoint must be one of {', '.join(get_args(Segment))}")
    return cast(Segment, text)


def validate_name(name: str, *, field: str = "path") -> str:
    """Gives back a checkpoint's bare name when it may be used."""
    if not name or len(name) > MAX_NAME_LENGTH:
        raise InvalidInput(field, f"a checkpoint's name has 1 to {MAX_NAME_LENGTH} characters")
    if not _NAME.fullmatch(name):
        raise InvalidInput(field, "a checkpoint's name may hold only letters, digits, '.', '_' and '-'")
    if ".." in name or name == ".":
        raise InvalidInput(field, "a checkpoint's name may not be '.' or hold '..'")
    return name


def is_model_id(text: str) -> bool:
    """Whether a text has the form of a training run's id; no base model's name and no path has it."""
    session_id, separator, number = text.rpartition(":train:")
    is_short = len(text) <= MAX_ID_LENGTH
    return bool(separator) and is_short and bool(_RUN_ID.fullmatch(session_id) and _NUMBER.fullmatch(number))


def validate_new_name(name: str, *, field: str = "path") -> str:
    """Gives back a checkpoint's bare name when it may be made."""
    if name.startswith("-"):
        raise InvalidInput(field, "a checkpoint's name may not begin with '-': tools take it for an option")
    return validate_name(name, field=field)


def parse_model_id(text: str, *, field: str = "model_id") -> ModelId:
    """Reads a model id."""
    session_id, number = _parse_numbered(text, ":train:", field)
    return ModelId(session_id, number)


def parse_sampling_session_id(text: str, *, field: str = "sampling_session_id") -> SamplingSessionId:
    """Reads a sampling session id."""
    session_id, number = _parse_numbered(text, ":sample:", field)
    return SamplingSessionId(session_id, number)


def parse_custom_loss_id(text: str, *, field: str = "loss_id") -> CustomLossId:
    """Reads a custom loss's id."""
    session_id, number = _parse_numbered(text, ":loss:", field)
    return CustomLossId(session_id, number)


def _parse_numbered(text: str, separator: str, field: str) -> tuple[str, int]:
    session_id, _, number = text.rpartition(separator)
    if len(text) > MAX_ID_LENGTH or not _RUN_ID.fullmatch(session_id) or not _NUMBER.fullmatch(number):
        raise InvalidInput(field, f"must have the form <session>{separator}<number>")
    return session_id, int(number)
