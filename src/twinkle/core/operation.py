"""The nouns of the queue: operations, their states and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OperationKind(StrEnum):
    """What an operation does. The values are wire words and label values; they never change."""

    CREATE_MODEL = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_WEIGHTS_EXTERNAL = "save_weights_external"
    LOAD_WEIGHTS = "load_weights"
    UNLOAD_MODEL = "unload_model"
    """Ends an adapter: no number of its lane comes after this one."""
    SAMPLE = "sample"
    CREATE_CUSTOM_LOSS = "create_custom_loss"
    """Defines a loss. No worker takes it: it is complete when it is accepted, numbered within its session."""
    FORK = "fork"
    """Begins an adapter as another one was after one of its operations."""
    REWIND = "rewind"
    """Puts an adapter back to what it was after an earlier operation of its own."""
    CALL = "call"
    """A call of the Twinkle dialect that neither runs the model nor steps: a setting, a part of a step, a question."""
    GAP = "gap"
    """Stands for a number that never arrived, so that its successors go on."""

    @property
    def task_name(self) -> str:
        """Its name as a task in Celery's event stream, hence in Flower."""
        return f"twinkle.{self.value}"

    @property
    def is_ordered(self) -> bool:
        """Whether it waits for its predecessor. Samples and losses do not: they arrive and finish in any order."""
        return self not in {OperationKind.SAMPLE, OperationKind.CREATE_CUSTOM_LOSS}

    @property
    def answers_protobuf(self) -> bool:
        """Whether its result bytes are protobuf (the Tinker SDK insists on it for these three)."""
        return self in {OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD, OperationKind.SAMPLE}


CANCELLED_BY_OPERATOR = "cancelled by the operator"
"""How the rejection of an operation begins that was cancelled while it waited."""


class OperationState(StrEnum):
    """Where an operation stands. ``DONE`` and ``FAILED`` are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether its outcome is recorded and will never change."""
        return self in {OperationState.DONE, OperationState.FAILED}


class FailureCategory(StrEnum):
    """Who can mend a failed operation, in the words of the Tinker wire."""

    USER = "user"
    SERVER = "server"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The request body of an operation: inline when small, else the key of a blob; neither once it is not kept."""

    inline: bytes | None = None
    blob: str | None = None
    blob_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """How much there is, or was."""
        return self.blob_bytes if self.inline is None else len(self.inline)

    @property
    def is_gone(self) -> bool:
        """Whether it was kept for its time and is gone."""
        return self.inline is None and self.blob is None


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A request on its way into the journal.

    ``lane`` is the adapter's id for ordered operations and the sampling session's id for samples; ``digest`` tells a
    resend from a different request with the same number. ``rejection`` is the user-visible reason why the operation
    will fail when its turn comes: its number is consumed all the same, so the run goes on. ``num_tokens`` is what it
    may come to, for fairness; ``num_prompt_tokens`` is a sample's prompt alone, for the account; ``num_sequences`` is
    how many a sample draws at once. ``request_key`` names a request whose number its client does not know.
    ``opens_sampler`` says of a save that it gives no checkpoint but a sampling session on weights without a name.
    """

    tenant: str
    lane: str
    seq: int
    kind: OperationKind
    digest: str
    payload: Payload
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_sequences: int = 1
    rejection: str | None = None
    request_key: str | None = None
    opens_sampler: bool = False


@dataclass(frozen=True, kw_only=True)
class Unnumbered:
    """A request on its way into a lane whose numbers the journal gives, in the order of arrival.

    ``request_key`` names it within its lane: the second time it gets the first one's future.
    """

    tenant: str
    lane: str
    kind: OperationKind
    digest: str
    payload: Payload
    num_tokens: int = 0
    rejection: str | None = None
    request_key: str | None = None
    opens_sampler: bool = False

    def at(self, seq: int) -> Submission:
        """The request with its number."""
        return Submission(
            tenant=self.tenant,
            lane=self.lane,
            seq=seq,
            kind=self.kind,
            digest=self.digest,
            payload=self.payload,
            num_tokens=self.num_tokens,
            rejection=self.rejection,
            request_key=self.request_key,
            opens_sampler=self.opens_sampler,
        )


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The claim ticket. ``is_new`` is false for a resend; ``mesh`` is who must hear of it."""

    request_id: str
    mesh: str
    is_new: bool


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An operation handed to the mesh worker that holds the lease.

    ``suspicions`` counts the attempts before this one at which its worker died or the device failed.
    """

    request_id: str
    tenant: str
    lane: str
    seq: int
    kind: OperationKind
    payload: Payload
    attempt: int
    suspicions: int = 0
    num_tokens: int
    accepted_at: float
    rejection: str | None
    failed_window_seq: int | None
    """The first failed ``forward_backward`` since the adapter's last ``optim_step``, if there is one."""
    num_sequences: int = 1
    """How many a sample draws at once."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why an operation failed: text for its user, and who can mend it."""

    message: str
    category: FailureCategory
    code: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the worker reports for one claimed operation: result bytes in wire form, or a failure.

    ``device_s`` is its share of device seconds and ``num_tokens`` what it processed, for the account; ``charge`` is
    what it counts for in fair share and towards its tenant's rate, in tokens (``scheduler/fairness.py``).
    """

    request_id: str
    lane: str
    seq: int
    kind: OperationKind
    result: Payload | None = None
    failure: Failure | None = None
    device_s: float = 0.0
    num_tokens: int = 0
    charge: int = 1
    clears_gradients: bool = False
    """Whether its adapter's gradients were cleared on purpose, so that what failed of them no longer counts."""

    def __post_init__(self) -> None:
        if (self.result is None) == (self.failure is None):
            raise ValueError("an outcome is either a result or a failure")


@dataclass(frozen=True, kw_only=True)
class FutureStatus:
    """What a future's owner may know.

    Of one that is ``expired`` the result is gone. Of one that was forgotten altogether nothing is known but that it has
    ended, which its failure says; its kind is that of a gap.
    """

    request_id: str
    kind: OperationKind
    state: OperationState
    lane: str
    seq: int
    attempt: int
    result: Payload | None
    failure: Failure | None
    expired: bool = False

    def why_expired(self, kept_s: float) -> str:
        """What to tell of it; ``kept_s`` is how long results are kept."""
        if self.kind is OperationKind.GAP and self.failure is not None:
            return self.failure.message
        return f"the result of {self.request_id} was kept for {kept_s / 3600:g} h and is gone"
