"""A server of the Twinkle dialect as others run it: its answers, which were captured, and what it insists on.

It knows no idempotency keys and keeps no outcomes, shows tracebacks, and answers nobody who names no request.
"""

from __future__ import annotations

import json
from typing import Any

from harness.scripted_server import Reply, ScriptedServer, Seen

SESSION = "session_e9225a3be69a4d74a23a30e807f6a9d4"
RUN = f"{SESSION}-a"
_FOLDER = f"/srv/outputs/2e1564f2a4cfa363/{RUN}"
_ROW = {"logprobs": [-0.75, -0.11, -1.21], "elementwise_loss": [0.87, 0.62, 0.76]}
_HEADERS = ("x-request-id", "serve_multiplexed_model_id", "serve-multiplexed-model-id", "twinkle-authorization")

_VOID = (
    "set_loss",
    "set_optimizer",
    "set_lr_scheduler",
    "set_template",
    "set_processor",
    "add_metric",
    "apply_patch",
    "backward",
    "step",
    "zero_grad",
    "lr_step",
    "clip_grad_and_step",
    "load",
)
_MODEL: dict[str, Any] = {
    "create": {"status": "ok"},
    "add_adapter_to_model": {"status": "ok", "adapter_name": RUN},
    "forward": {"result": [{**_ROW, "loss": 0.0}]},
    "forward_only": {"result": [{**_ROW, "loss": 0.0}]},
    "forward_backward": {"result": [[{**_ROW, "loss": 0.637}], 0.637]},
    "calculate_loss": {"result": 0.637},
    "clip_grad_norm": {"result": "0.0"},
    "calculate_metric": {"result": {"loss": 0.5, "grad_norm": 0.1}},
    "get_train_configs": {"result": "{}"},
    "get_state_dict": {"result": {}},
    "resume_from_checkpoint": {"result": {"status": "ok", "progress": {}}},
    "upload_to_hub": {"request_id": "req_d647ee4f98924f61b7bd5eddbaa1b52b"},
    **dict.fromkeys(_VOID),
}
_SAMPLER: dict[str, Any] = {
    "create": {"status": "ok"},
    "set_template": {"status": "ok"},
    "apply_patch": {"status": "ok"},
    "add_adapter_to_sampler": {"status": "ok", "adapter_name": RUN},
}


class UpstreamServer(ScriptedServer):
    """Answers as it was seen to answer."""

    def __init__(self) -> None:
        super().__init__(self._reply)

    def bodies(self, method: str) -> list[dict[str, Any]]:
        """What was sent to a method, in its order."""
        return [json.loads(seen.content or b"{}") for seen in self.seen if seen.path.endswith(f"/twinkle/{method}")]

    def _reply(self, seen: Seen) -> Reply:
        missing = [name for name in _HEADERS if not seen.headers.get(name)]
        if missing:
            return Reply(400, {"detail": f"missing {missing[0]}"})
        path = seen.path.removeprefix("/api/v1")
        body = json.loads(seen.content or b"{}")
        if path.startswith("/model/"):
            return self._model(path.rpartition("/twinkle/")[2], body)
        if path.startswith("/sampler/"):
            return self._sampler(path.rpartition("/")[2], body)
        if path == "/twinkle/create_session":
            return Reply(200, {"session_id": SESSION})
        if path == "/twinkle/session_heartbeat":
            return Reply(200, {})
        return Reply(404, {"detail": "Not Found"})

    def _model(self, method: str, body: dict[str, Any]) -> Reply:
        if method.startswith("upload_status/"):
            return Reply(200, {"request_id": method.partition("/")[2], "status": "completed", "error": None})
        if method == "add_adapter_to_model" and not isinstance(body["config"], str):
            wrong = {"type": "string_type", "loc": ["body", "config"], "msg": "Input should be a valid string"}
            return Reply(422, {"detail": [wrong]})
        if method == "save":
            kind = "sampler_weights/20261120_225700" if body.get("is_sampler") else f"weights/{body['name']}"
            return Reply(200, {"twinkle_path": f"twinkle://{RUN}/{kind}", "checkpoint_dir": f"{_FOLDER}/{kind}"})
        if method != "add_adapter_to_model" and body.get("adapter_name", "a") not in ("a", "default"):
            words = 'Traceback (most recent call last):\n  File "x.py"\nAssertionError: Adapter zzz not found\n'
            return Reply(500, {"detail": words})
        return Reply(200, _MODEL[method]) if method in _MODEL else Reply(404, {"detail": "Not Found"})

    def _sampler(self, method: str, body: dict[str, Any]) -> Reply:
        if method != "sample":
            return Reply(200, _SAMPLER[method]) if method in _SAMPLER else Reply(404, {"detail": "Not Found"})
        params = body["sampling_params"] or {}
        sequence = {
            "stop_reason": "length",
            "tokens": [23, 13],
            "logprobs": [[[23, -0.86]], [[13, -0.18]]] if params.get("logprobs") else None,
            "decoded": None,
        }
        return Reply(200, {"samples": [_sampled(row, sequence, params) for row in body["inputs"]]})


def _sampled(row: dict[str, Any], sequence: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    prompt = row.get("input_ids", [])
    feature = {**row, "input_ids": [*prompt, 23, 13], "labels": [*[-100] * len(prompt), 23, 13]}
    sequences = [{**sequence, "new_input_feature": feature}] * params.get("num_samples", 1)
    return {"sequences": sequences, "prompt_logprobs": None, "topk_prompt_logprobs": None}
