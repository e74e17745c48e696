"""Runs of the Twinkle dialect in the journal, as its API submits them, and what each call came to."""

from __future__ import annotations

import json
from typing import Any

from harness.journal import CONFIG, Bench, digest, new_adapter, submission
from twinkle.core.adapter import AdapterConfig, Dialect
from twinkle.core.operation import Accepted, FutureStatus, OperationKind, Payload, Unnumbered
from twinkle.wire.calls import CALL_KINDS, Call, encode_call

TWINKLE = CONFIG.model_copy(update={"dialect": Dialect.TWINKLE, "peft": {"r": 4, "lora_alpha": 8}})


class CalledRun:
    """One adapter, and short words for the calls of a training script on it."""

    def __init__(
        self, bench: Bench, adapter: str = "a", *, tenant: str = "t0", config: AdapterConfig = TWINKLE
    ) -> None:
        self.bench = bench
        self.adapter = adapter
        self.tenant = tenant
        self.calls: list[Call | None] = [None]
        body = config.model_dump_json().encode()
        first = submission(adapter, 0, OperationKind.CREATE_MODEL, body=body, tenant=tenant)
        bench.journal.open_lane(new_adapter(adapter, tenant=tenant, config=config), first)

    def call(self, method: str, *, num_tokens: int = 1, rejection: str | None = None, **arguments: Any) -> int:
        """Submit a call; its number."""
        call = Call(method=method, arguments=arguments)
        payload = encode_call(call)
        request = Unnumbered(
            tenant=self.tenant,
            lane=self.adapter,
            kind=CALL_KINDS[method],
            digest=digest(payload),
            payload=Payload(inline=payload),
            num_tokens=num_tokens,
            rejection=rejection,
        )
        (accepted,) = self.bench.journal.append([request])
        assert isinstance(accepted, Accepted), accepted
        self.calls.append(call)
        return int(accepted.request_id.rpartition(":")[2])

    def status(self, seq: int) -> FutureStatus:
        """How a call has ended."""
        return self.bench.status(self.adapter, seq)

    def body(self, seq: int) -> Any:
        """The JSON that a call came to."""
        status = self.status(seq)
        assert status.result is not None and status.result.inline is not None, status.failure
        return json.loads(status.result.inline)

    def failure(self, seq: int) -> str:
        """Why a call failed."""
        failure = self.status(seq).failure
        assert failure is not None
        return f"{failure.code}: {failure.message}"


def row(*tokens: int) -> dict[str, list[int]]:
    """A row as a template makes it: the label of a token is the next one."""
    return {"input_ids": list(tokens), "labels": [*tokens[1:], -100]}
