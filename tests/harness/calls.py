"""Short words for what tests send to the API."""

from __future__ import annotations

import httpx
import numpy as np

from twinkle.wire.training import ForwardBackwardBody, WireDatum, encode_forward_backward

PROTOBUF = {"content-type": "application/x-protobuf"}


def retrieve(client: httpx.Client, request_id: str, **headers: str) -> httpx.Response:
    """Poll until the future ends, as the SDK does."""
    for _ in range(40):
        response = client.post("/retrieve_future", json={"request_id": request_id}, headers=headers)
        if response.status_code != 408:
            return response
    raise AssertionError(f"{request_id} never ended")


def passes(model_id: str, seq_id: int, *, length: int = 4, token: int = 5, forward_only: bool = False) -> bytes:
    """The body of a forward_backward with one datum."""
    tokens = np.full(length, token, dtype=np.int64)
    inputs = {"target_tokens": tokens, "weights": np.ones(length, dtype=np.float32)}
    body = ForwardBackwardBody(model_id, seq_id, forward_only, "cross_entropy", {}, (WireDatum(tokens, inputs),))
    return encode_forward_backward(body)


def send_passes(client: httpx.Client, body: bytes, **headers: str) -> httpx.Response:
    """Submit a forward_backward."""
    return client.post("/forward_backward", content=body, headers=PROTOBUF | headers)


def optim_step(model_id: str, seq_id: int, learning_rate: float = 1e-4) -> dict[str, object]:
    """The body of an optim_step."""
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": learning_rate}}
