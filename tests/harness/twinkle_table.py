"""Every method and path of the Twinkle dialect: what any client of it may ask for below ``/api/v1``.

Written from the reference's list of routes; a test holds it against what the client of `twinkle-kit` sends.
"""

from __future__ import annotations

MODEL_METHODS = (
    "create",
    "add_adapter_to_model",
    "set_loss",
    "set_optimizer",
    "set_lr_scheduler",
    "set_template",
    "set_processor",
    "add_metric",
    "apply_patch",
    "forward",
    "forward_only",
    "calculate_loss",
    "backward",
    "forward_backward",
    "clip_grad_norm",
    "step",
    "zero_grad",
    "lr_step",
    "clip_grad_and_step",
    "calculate_metric",
    "get_train_configs",
    "get_state_dict",
    "save",
    "load",
    "resume_from_checkpoint",
    "upload_to_hub",
)
SAMPLER_METHODS = ("create", "sample", "sample_stream", "set_template", "add_adapter_to_sampler", "apply_patch")
PROCESSOR_METHODS = ("create", "call")

GATEWAY = (
    "GET /twinkle/healthz",
    "GET /twinkle/healthz/deep",
    "GET /twinkle/capacity_info",
    "GET /twinkle/get_server_capabilities",
    "POST /twinkle/create_session",
    "POST /twinkle/session_heartbeat",
    "GET /twinkle/training_runs",
    "GET /twinkle/training_runs/{run}",
    "GET /twinkle/training_runs/{run}/checkpoints",
    "DELETE /twinkle/training_runs/{run}/checkpoints/{checkpoint}",
    "POST /twinkle/weights_info",
    "GET /twinkle/checkpoint_path/{run}/{checkpoint}",
    "GET /twinkle/status",
    "GET /models",
    "POST /chat/completions",
)
TABLE: frozenset[str] = frozenset(
    (
        *GATEWAY,
        *(f"POST /model/{{model}}/twinkle/{name}" for name in MODEL_METHODS),
        "GET /model/{model}/twinkle/upload_status/{request}",
        "GET /model/{model}/healthz",
        *(f"POST /sampler/{{model}}/twinkle/{name}" for name in SAMPLER_METHODS),
        *(f"POST /processor/twinkle/{name}" for name in PROCESSOR_METHODS),
    )
)
"""``METHOD path``, with names in braces; a model's name and a checkpoint's may hold slashes."""

NOT_SENT_BY_TWINKLE_KIT: frozenset[str] = frozenset(
    (
        "GET /twinkle/healthz/deep",
        "GET /twinkle/status",
        "GET /models",
        "POST /chat/completions",
        "GET /model/{model}/healthz",
        "POST /sampler/{model}/twinkle/sample_stream",
    )
)
"""Rows that upstream's server answers and its client has no method for."""
