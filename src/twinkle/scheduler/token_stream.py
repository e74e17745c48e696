"""Tokens of samples that somebody listens to, on their way from a worker to an API over one Redis publish.

A side channel like the nudges: what is true stands in the journal, and all of this may be lost, doubled or re-ordered.
Unlike nudges it carries data, of samples whose clients asked for a stream and of nobody else.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

import redis
import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from twinkle.scheduler.channels import SILENCE_S, impatient_redis
from twinkle.wire.bodies.base import Identifier
from twinkle.wire.sampling import SampleRequest, TokenId

# A token, or one of its likeliest alternatives, takes about 35 bytes at most.
_MAX_CELLS_PER_PIECE = 1024
_MAX_MESSAGE_BYTES = 64 * 1024
_MAX_CELLS_WAITING = 256 * 1024

_log = structlog.get_logger()

ListenerId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Listener(BaseModel):
    """The API process that wants to hear of a sample before it is done, and whether scores are wanted too."""

    model_config = ConfigDict(frozen=True, strict=True)

    id: ListenerId
    scores: bool


class SampledInput(BaseModel):
    """What the answer to a call of the Twinkle dialect says beside the sample itself, for whoever asks for it later."""

    model_config = ConfigDict(frozen=True)

    packed_row: str
    """The input as it came, with its tokens, as :meth:`pack` packs it: whoever draws the sample need not read it."""
    is_scored_only: bool
    tokenizer_path: str | None = None
    checkpoint: str | None = None
    others: list[Identifier] = Field(default_factory=list)
    """Kept with the first sample of a call: the request ids of those behind it."""

    @staticmethod
    def pack(row: Mapping[str, Any]) -> str:
        """A row as one short text, which counts as one value of a body."""
        return base64.b64encode(zlib.compress(json.dumps(row).encode(), level=1)).decode()

    @property
    def row(self) -> dict[str, Any]:
        """The input."""
        row: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(self.packed_row)))
        return row


class ListenedSample(SampleRequest):
    """A sample as the journal keeps it. What it has more than a client sent is no part of the fingerprint."""

    listener: Listener | None = None
    sampled_input: SampledInput | None = None


class TokenPiece(BaseModel):
    """Tokens of one sample in a row, from position ``start`` on.

    ``logprobs`` has one entry for each token and ``topk`` the likeliest tokens with theirs; neither if not wanted.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", ser_json_inf_nan="constants")

    request_id: Identifier
    sample: int = Field(ge=0)
    start: int = Field(ge=0)
    tokens: list[TokenId]
    logprobs: list[float] | None = None
    topk: list[list[tuple[TokenId, float]]] | None = None

    @model_validator(mode="after")
    def _lists_go_together(self) -> Self:
        for scores in (self.logprobs, self.topk):
            if scores is not None and len(scores) != len(self.tokens):
                raise ValueError("there is not one entry for each token")
        return self

    @property
    def num_cells(self) -> int:
        """How much it holds: tokens, and their alternatives."""
        return len(self.tokens) + sum(map(len, self.topk or ()))

    def in_small(self) -> Iterator[TokenPiece]:
        """The same in pieces that each fit a message."""
        width = 1 + max(map(len, self.topk or ()), default=0)
        step = max(1, _MAX_CELLS_PER_PIECE // width)
        for i in range(0, len(self.tokens), step):
            yield TokenPiece(
                request_id=self.request_id,
                sample=self.sample,
                start=self.start + i,
                tokens=self.tokens[i : i + step],
                logprobs=None if self.logprobs is None else self.logprobs[i : i + step],
                topk=None if self.topk is None else self.topk[i : i + step],
            )


def token_channel(listener_id: str) -> str:
    """Where one API process hears of tokens. A message is any number of pieces, one a line."""
    return f"twinkle.tokens.{listener_id}"


def read_piece(line: str) -> TokenPiece | None:
    """A line of a message; none if it is not one of ours."""
    try:
        return TokenPiece.model_validate_json(line)
    except ValidationError:
        return None


class TokenPublisher:
    """The worker's end: a thread of its own, so that the sampler never waits for the broker."""

    def __init__(self, redis_url: str) -> None:
        self._redis = impatient_redis(redis_url)
        self._waiting: list[tuple[str, TokenPiece]] = []
        self._num_cells = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tokens", daemon=True)

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

    def stop(self) -> None:
        """Publish what is left, then end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def offer(self, listener_id: str, piece: TokenPiece) -> None:
        """Publish soon. Returns at once and never raises; while too much waits, pieces are lost."""
        with self._changed:
            if self._num_cells + piece.num_cells <= _MAX_CELLS_WAITING:
                self._waiting.append((listener_id, piece))
                self._num_cells += piece.num_cells
                self._changed.notify()

    @property
    def num_cells_waiting(self) -> int:
        """How many tokens, and alternatives to them, wait to be published."""
        return self._num_cells

    def _run(self) -> None:
        silent_until = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                waiting, self._waiting, self._num_cells = self._waiting, [], 0
                if not waiting:
                    return
            if time.monotonic() < silent_until:
                continue
            try:
                self._publish(waiting)
            except redis.RedisError as error:
                if isinstance(error, redis.TimeoutError):
                    silent_until = time.monotonic() + SILENCE_S
                _log.warning("tokens.publish_failed", error=str(error), next="the rest comes with the result")
            except Exception as error:  # noqa: BLE001 - the border: one bad piece must not silence all others
                _log.error("tokens.publish_failed", error=str(error), exc_info=error)

    def _publish(self, waiting: Sequence[tuple[str, TokenPiece]]) -> None:
        with self._redis.pipeline(transaction=False) as pipeline:
            for listener_id in dict.fromkeys(listener_id for listener_id, _ in waiting):
                pieces = (piece for to, piece in waiting if to == listener_id)
                for message in _messages(pieces):
                    pipeline.publish(token_channel(listener_id), message)
            pipeline.execute()


def _messages(pieces: Iterable[TokenPiece]) -> Iterator[str]:
    lines: list[str] = []
    num_bytes = 0
    for piece in pieces:
        for small in piece.in_small():
            line = small.model_dump_json(exclude_none=True)
            if lines and num_bytes + len(line) > _MAX_MESSAGE_BYTES:
                yield "\n".join(lines)
                lines, num_bytes = [], 0
            lines.append(line)
            num_bytes += len(line) + 1
    if lines:
        yield "\n".join(lines)
