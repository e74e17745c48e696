"""Operations in the forms in which the API stores them, and what each should come to, computed one by one."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.journal import CONFIG, Bench, digest
from twinkle.core.operation import OperationKind, Payload, Submission
from twinkle.wire.training import ForwardBackwardBody, WireDatum, encode_forward_backward


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request before it has a number: passes have tokens, steps a learning rate, checkpoints a name."""

    kind: OperationKind
    tokens: tuple[int, ...] = ()
    is_bad: bool = False
    loss_fn: str = "cross_entropy"
    learning_rate: float = 0.0
    name: str = ""
    with_optimizer: bool = False
    rejection: str | None = None
    sampler_number: int | None = None
    """The number of the sampling session it opens, which all adapters of a client's session share; else its own."""
    ttl_s: int | None = None

    def numbered(self, adapter: str, seq: int, *, tenant: str = "t0") -> Submission:
        body = self._body(adapter, seq)
        return Submission(
            tenant=tenant,
            lane=adapter,
            seq=seq,
            kind=self.kind,
            digest=digest(body),
            payload=Payload(inline=body),
            num_tokens=len(self.tokens),
            rejection=self.rejection,
        )

    def _body(self, adapter: str, seq: int) -> bytes:
        address = {"model_id": adapter, "seq_id": seq}
        match self.kind:
            case OperationKind.CREATE_MODEL:
                return CONFIG.model_dump_json().encode()
            case OperationKind.FORWARD | OperationKind.FORWARD_BACKWARD:
                return self._pass(adapter, seq)
            case OperationKind.OPTIM_STEP:
                rate = None if math.isnan(self.learning_rate) else self.learning_rate
                return json.dumps({**address, "adam_params": {"learning_rate": rate}}).encode()
            case OperationKind.SAVE_WEIGHTS:
                return json.dumps({**address, "path": self.name}).encode()
            case OperationKind.SAVE_WEIGHTS_FOR_SAMPLER:
                number = {"sampling_session_seq_id": self.sampler_number or seq}
                return json.dumps({**address, **number, "ttl_seconds": self.ttl_s}).encode()
            case OperationKind.LOAD_WEIGHTS:
                path = f"tinker://{adapter}/weights/{self.name}"
                return json.dumps({"path": path, "optimizer": self.with_optimizer}).encode()
            case _:
                raise ValueError(self.kind)

    def _pass(self, adapter: str, seq: int) -> bytes:
        tokens = np.array(self.tokens, dtype=np.int64)
        datum = WireDatum(tokens, {} if self.is_bad else {"target_tokens": tokens})
        body = ForwardBackwardBody(
            model_id=adapter,
            seq_id=seq,
            forward_only=self.kind is OperationKind.FORWARD,
            loss_fn=self.loss_fn,
            loss_fn_config={},
            data=(datum,),
        )
        return encode_forward_backward(body)


def sample_body(session: str, seq: int) -> bytes:
    prompt = {"chunks": [{"tokens": [1, 2, 3]}]}
    params = {"max_tokens": 2, "seed": 1}
    address = {"sampling_session_id": session, "seq_id": seq}
    return json.dumps({**address, "prompt": prompt, "sampling_params": params}).encode()


def create() -> Request:
    return Request(kind=OperationKind.CREATE_MODEL)


def forward_backward(
    *tokens: int, is_bad: bool = False, rejection: str | None = None, loss_fn: str = "cross_entropy"
) -> Request:
    kind = OperationKind.FORWARD_BACKWARD
    return Request(kind=kind, tokens=tokens or (1, 2), is_bad=is_bad, rejection=rejection, loss_fn=loss_fn)


def forward(*tokens: int) -> Request:
    return Request(kind=OperationKind.FORWARD, tokens=tokens or (1, 2))


def optim_step(learning_rate: float = 0.5) -> Request:
    return Request(kind=OperationKind.OPTIM_STEP, learning_rate=learning_rate)


def save(name: str) -> Request:
    return Request(kind=OperationKind.SAVE_WEIGHTS, name=name)


def save_for_sampler(*, ttl_s: int | None = None) -> Request:
    return Request(kind=OperationKind.SAVE_WEIGHTS_FOR_SAMPLER, ttl_s=ttl_s)


def load(name: str, *, with_optimizer: bool = False) -> Request:
    return Request(kind=OperationKind.LOAD_WEIGHTS, name=name, with_optimizer=with_optimizer)


@dataclass
class SequentialAdapter:
    """One adapter, its operations applied one by one, in order, by nobody who could die: the truth to compare with."""

    applied: str = ""
    pending: str = ""
    steps: int = 0
    window: int | None = None
    saved: dict[str, tuple[str, int]] = field(default_factory=dict)

    def apply(self, seq: int, request: Request | None) -> str:
        """What operation ``seq`` comes to: ``done``, or the code of its failure; ``None`` is one that never arrived."""
        if request is None or request.rejection is not None or request.is_bad:
            return self._refuse(seq, request)
        match request.kind:
            case OperationKind.CREATE_MODEL:
                self.applied = _chain("", CONFIG.model_dump_json())
            case OperationKind.FORWARD_BACKWARD:
                self.pending = _chain(self.pending, np.array(request.tokens, dtype=np.int64).tobytes().hex())
            case OperationKind.OPTIM_STEP:
                return self._step(request.learning_rate)
            case OperationKind.SAVE_WEIGHTS:
                if self.saved.setdefault(request.name, (self.applied, self.steps)) != (self.applied, self.steps):
                    return "invalid_input"
            case OperationKind.LOAD_WEIGHTS:
                if request.name not in self.saved:
                    return "invalid_input"
                self.applied, steps = self.saved[request.name]
                self.steps = steps if request.with_optimizer else 0
                self.pending, self.window = "", None
            case _:
                pass
        return "done"

    def _refuse(self, seq: int, request: Request | None) -> str:
        if request is None or request.kind is OperationKind.FORWARD_BACKWARD:
            self.window = seq if self.window is None else self.window
        if request is None:
            return "gap"
        return "user" if request.rejection is not None else "invalid_input"

    def _step(self, learning_rate: float) -> str:
        if self.window is not None:
            self.pending, self.window = "", None
            return "window_failed"
        if not math.isfinite(learning_rate):
            return "invalid_input"
        self.applied = _chain(self.applied, self.pending, repr(learning_rate))
        self.pending = ""
        self.steps += 1
        return "done"

    def step_metrics(self) -> dict[str, float]:
        """What an ``optim_step`` that has just been applied answers."""
        return {"step": float(self.steps), "state": float(int(self.applied[:12], 16))}


def replayed(requests: Sequence[Request | None]) -> tuple[SequentialAdapter, list[tuple[str, dict[str, float] | None]]]:
    """A whole run one by one: the adapter at its end, and each operation's outcome and step metrics."""
    adapter = SequentialAdapter()
    outcomes: list[tuple[str, dict[str, float] | None]] = []
    for seq, request in enumerate(requests):
        code = adapter.apply(seq, request)
        is_step = request is not None and request.kind is OperationKind.OPTIM_STEP and code == "done"
        outcomes.append((code, adapter.step_metrics() if is_step else None))
    return adapter, outcomes


def _chain(previous: str, *parts: str) -> str:
    return hashlib.sha256("\n".join((previous, *parts)).encode()).hexdigest()


def submit_run(bench: Bench, *requests: Request, adapter: str = "a") -> list[Request | None]:
    """A new adapter and its requests; the whole run."""
    run = [create(), *requests]
    bench.adapter(adapter)
    bench.append(*(request.numbered(adapter, seq) for seq, request in enumerate(run) if seq > 0))
    return list(run)
