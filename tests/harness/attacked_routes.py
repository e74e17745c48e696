"""The routes of the app's own OpenAPI document, with a valid body for each that takes JSON: what attacks begin with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import quote, urlencode

import httpx

from harness.calls import passes
from harness.fake_worker import BASE_MODEL
from harness.hostile import Json
from harness.victim import REVOKE, Victim
from twinkle.core.processors import PROCESSOR_PREFIX
from twinkle.core.settings import Settings
from twinkle.server.app import create_app
from twinkle.server.errors import JSON
from twinkle.server.openapi import PROTOBUF

CHAT: Json = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
# Refused whatever else is: a sample would be waited for, and the worker rests.
SAMPLE_ROW: Json = {"input_ids": [1, 5000], "position_ids": [0, 1], "user_data": [["a", 1]], "labels": [2, -100]}
SAMPLE: dict[str, Json] = {
    "inputs": [
        SAMPLE_ROW,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}], "images": ["data:image/png;base64,AA=="]},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "images": ["data:image/png;base64,AA=="],
        },
    ],
    "sampling_params": {"max_tokens": 4, "temperature": 0.5, "stop": ["a"], "logprobs": 2, "prompt_logprobs": 1},
    "num_samples": 2,
    "adapter_name": "a",
    "adapter_uri": "$path",
}
PASS: Json = {
    "data": [
        {
            "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
                "weights": {"data": [1.0, 0.5, 0], "dtype": "float32"},
            },
        }
    ],
    "loss_fn": "ppo",
    "loss_fn_config": {"clip_low_threshold": 0.8},
}
BODIES: dict[str, Json] = {
    "/api/v1/forward_backward": {"model_id": "$run", "seq_id": 3, "forward_backward_input": PASS},
    "/api/v1/forward": {"model_id": "$run", "seq_id": 4, "forward_input": PASS},
    "/api/v1/optim_step": {"model_id": "$run", "seq_id": 5, "adam_params": {"learning_rate": 1e-4, "beta1": 0.9}},
    "/api/v1/save_weights": {
        "model_id": "$run",
        "seq_id": 6,
        "path": "a",
        "ttl_seconds": 9,
        "user_metadata": {"a": [1]},
    },
    "/api/v1/save_weights_for_sampler": {"model_id": "$run", "seq_id": 7, "sampling_session_seq_id": 3},
    "/api/v1/save_weights_external": {"model_id": "$run", "seq_id": 8, "path": "a", "age_encryption_recipients": ["a"]},
    "/api/v1/load_weights": {"model_id": "$run", "seq_id": 9, "path": "$path", "optimizer": True},
    "/api/v1/unload_model": {"model_id": "$run"},
    "/api/v1/retrieve_future": {"request_id": "$request", "allow_metadata_only": True},
    "/api/v1/retrieve_futures": {
        "target": {"sampling_session_id": "$sampler", "cloned_sampler_id": 1, "type": "sampling_session"},
        "prev_cursor": 1,
        "timeout": 0.01,
        "retrieved_request_ids": ["$request"],
    },
    "/api/v1/cancel_future": {"request_id": "$request"},
    "/api/v1/create_sampling_session": {
        "session_id": "$session",
        "sampling_session_seq_id": 2,
        "base_model": BASE_MODEL,
    },
    "/api/v1/join_sampling_session": {"sampling_session_id": "$sampler"},
    "/api/v1/asample": {
        "sampling_session_id": "$sampler",
        "seq_id": 1,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4, "seed": 1, "stop": [3], "temperature": 0.5, "top_k": 4, "top_p": 0.5},
        "topk_sample_logprobs": 1,
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 1,
        "target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]},
    },
    "/api/v1/client/config": {"sdk_version": "0.38.0"},
    "/api/v1/client/dynamic_config": {"sdk_version": "0.38.0"},
    "/api/v1/telemetry": {"events": [{"event": "SESSION_START"}], "session_id": "$session"},
    "/api/v1/create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "project_id": "p", "display_name": "d"},
    "/api/v1/session_heartbeat": {"session_id": "$session"},
    "/api/v1/sessions/{session_id}/finish": {"reason": {"type": "success"}, "detail": "done"},
    "/api/v1/sessions/{session_id}/project": {"project_id": "p"},
    "/api/v1/create_model": {
        "session_id": "$session",
        "model_seq_id": 1,
        "base_model": BASE_MODEL,
        "lora_config": {"rank": 4, "seed": 1, "train_mlp": True},
        "optimizer_config": {"type": "adamw"},
    },
    "/api/v1/create_custom_loss": {
        "session_id": "$session",
        "custom_loss_seq_id": 1,
        "name": "double",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {
            "format": 1,
            "nodes": [
                {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
                {"op": "call_function", "name": "mul", "target": "operator.mul", "args": [{"ref": "logprobs"}, 2.0]},
                {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "mul"}], "kwargs": {"dim": 0}},
                {
                    "op": "output",
                    "name": "output",
                    "target": "output",
                    "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {"custom/a:sum": {"ref": "sum_1"}}}]}],
                },
            ],
        },
    },
    "/api/v1/get_info": {"model_id": "$run"},
    "/api/v1/weights_info": {"tinker_path": "$path"},
    "/api/v1/training_runs/{run_id}/checkpoints/{segment}/{name}/ttl": {"ttl_seconds": 1000},
    "/api/v1/copy_weights": {"source_path": "$path", "destination_project_id": "p", "ttl_seconds": 100},
    "/api/v1/sessions/search": {
        "session_id": "$session",
        "display_name": "d",
        "user_metadata": {"a": "b"},
        "project_ids": ["p"],
        "owner": {"type": "own"},
        "statuses": [{"type": "active"}],
        "limit": 5,
        "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "$session"},
    },
    "/api/v1/twinkle/pushes": {"to": "ms://owner/{run}", "hub_token": "a", "run_id": "$run", "private": True},
    "/api/native/v1/futures/collect": {"request_ids": ["$request"], "timeout_s": 1},
    "/api/native/v1/runs/{run_id}/rewind": {"step": 1},
    "/api/native/v1/runs/{run_id}/fork": {"operation": 1, "session_id": "$session", "model_seq_id": 4},
    "/api/native/v1/jobs": {"kind": "ops", "spec": {"model": "$model", "data": "file-1"}, "after": [], "priority": 3},
    "/api/native/v1/count_tokens": {"endpoint": "/v1/completions", "requests": [{"model": "$model", "prompt": [1]}]},
    "/api/native/v1/jobs/many": {
        "jobs": [{"kind": "ops", "spec": {"model": "$model", "data": "file-1"}, "name": "a", "metadata": {"a": "b"}}]
    },
    "/api/native/v1/access_tokens": {"path": "$path", "name": "a", "ttl_seconds": 60},
    "/api/native/v1/uploads": {"filename": "a.jsonl", "size_bytes": 10, "sha256": "0" * 64, "expires_after_s": 3600},
    "/v1/uploads": {
        "bytes": 10,
        "filename": "a.jsonl",
        "mime_type": "text/jsonl",
        "purpose": "batch",
        "expires_after": {"anchor": "created_at", "seconds": 3600},
    },
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["part_1"], "md5": "0" * 32},
    "/v1/batches": {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    },
    "/v1/fine_tuning/jobs": {
        "model": BASE_MODEL,
        "training_file": "file-1",
        "validation_file": "file-2",
        "suffix": "mine",
        "seed": 1,
        "metadata": {"a": "b"},
        "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.1, "n_epochs": "auto", "batch_size": 2}}},
    },
    "/v1/fine_tuning/alpha/graders/validate": {
        "grader": {
            "type": "multi",
            "name": "both",
            "graders": {
                "same": {
                    "type": "string_check",
                    "name": "same",
                    "operation": "eq",
                    "input": "{{sample.output_text}}",
                    "reference": "{{item.answer}}",
                },
            },
            "calculate_output": "0.5 * same",
        },
    },
    "/v1/fine_tuning/alpha/graders/run": {
        "grader": {
            "type": "text_similarity",
            "name": "like",
            "evaluation_metric": "rouge_l",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
        },
        "item": {"answer": "four"},
        "model_sample": "four",
    },
    "/v1/chat/completions": CHAT,
    "/api/v1/chat/completions": CHAT,
    "/api/v1/sampler/{base_model}/twinkle/create": {},
    "/api/v1/sampler/{base_model}/twinkle/set_template": {
        "template_cls": "Template",
        "adapter_name": "a",
        "model_id": "$model",
        "max_length": 100,
        "default_system": "be brief",
        "color": "red",
    },
    "/api/v1/sampler/{base_model}/twinkle/add_adapter_to_sampler": {"adapter_name": "a", "config": {"r": 4}},
    "/api/v1/sampler/{base_model}/twinkle/apply_patch": {"patch_cls": "NoopPatch", "adapter_name": "a"},
    "/api/v1/sampler/{base_model}/twinkle/sample": SAMPLE,
    "/api/v1/sampler/{base_model}/twinkle/sample_stream": {**SAMPLE, "inputs": [SAMPLE_ROW]},
    "/api/v1/twinkle/create_session": {"metadata": {"a": "b"}},
    "/api/v1/twinkle/session_heartbeat": {"session_id": "$session"},
    "/api/v1/twinkle/weights_info": {"twinkle_path": "$path"},
    "/api/v1/model/{base_model}/twinkle/create": {"ignored": 1},
    "/api/v1/model/{base_model}/twinkle/add_adapter_to_model": {
        "adapter_name": "b",
        "config": {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj"],
            "rank_pattern": {"q": 2},
        },
        "gradient_accumulation_steps": 2,
        "seed": 1,
        "save_dir": "a",
    },
    "/api/v1/model/{base_model}/twinkle/remove_adapter": {"adapter_name": "$adapter"},
    "/api/v1/model/{base_model}/twinkle/save": {
        "adapter_name": "$adapter",
        "name": "a",
        "save_optimizer": True,
        "is_sampler": False,
        "consumed_train_samples": 3,
        "ttl_s": 60,
    },
    "/api/v1/model/{base_model}/twinkle/load": {"adapter_name": "$adapter", "name": "$path", "load_optimizer": True},
    "/api/v1/model/{base_model}/twinkle/resume_from_checkpoint": {
        "adapter_name": "$adapter",
        "name": "a",
        "resume_only_model": True,
    },
    "/api/v1/model/{base_model}/twinkle/upload_to_hub": {
        "checkpoint_dir": {"twinkle_path": "$path", "checkpoint_dir": "$path"},
        "hub_model_id": "hf://me/model",
        "hub_token": "t",
        "private": True,
    },
    "/api/v1/model/{base_model}/twinkle/{method}": {
        "adapter_name": "$adapter",
        "inputs": [{"input_ids": [1, 2], "labels": [2, -100]}, {"messages": [{"role": "user", "content": "hi"}]}],
        "advantages": [0.5, 1.0],
        "disable_lora": True,
    },
    "/api/v1/processor/twinkle/create": {
        "processor_type": "dataset",
        "class_type": "Dataset",
        "dataset_meta": {
            "dataset_id": "ms://org/name",
            "data_slice": {"_slice_type_": "range", "start": 0, "stop": 6, "step": 1},
            "data": [{"a": 1}],
        },
    },
    "/api/v1/processor/twinkle/call": {
        "processor_id": "$processor",
        "function": "map",
        "preprocess_func": "CountdownProcessor",
        "init_args": {"a": 1},
        "dataset_meta": '{"dataset_id": "org/name"}',
    },
    "/v1/completions": {"model": BASE_MODEL, "prompt": "hi", "max_tokens": 4, "n": 2, "stop": ["a"]},
}
"""A valid body of every route that takes JSON; `$name` stands for an id of the tenant that sends it."""

IGNORING = {"/api/v1/client/config", "/api/v1/client/dynamic_config", "/api/v1/telemetry"}
"""They look at no body."""
# Nobody waits for a worker that rests; the adapters of this client have a session.
ASIDE = {"prefer": "respond-async", "x-request-id": "hostile"}
_ID_OF_PARAMETER = {
    "run_id": "$run",
    "session_id": "$session",
    "sampler_id": "$sampler",
    "request_id": "$request",
    "base_model": "$model",
    "method": "$method",
    "segment": "$segment",
    "name": "$name",
    "processor_id": "$processor",
    "mesh": "$mesh",
}
# What nobody owns: the names of models, methods and kinds are the same for all.
_PUBLIC = {"$model", "$method", "$segment", "$name", "$mesh"}
_NOBODYS = "00000000-0000-4000-8000-000000000000"


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    path_names: tuple[str, ...] = ()
    query_names: tuple[str, ...] = ()
    body_types: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.method} {self.path}{' in protobuf' if PROTOBUF in self.body_types else ''}"


def _routes() -> list[Route]:
    app = create_app(Settings(redis_url="redis://nowhere"))
    return [
        Route(
            method.upper(),
            path,
            tuple(one["name"] for one in call.get("parameters", ()) if one["in"] == "path"),
            tuple(one["name"] for one in call.get("parameters", ()) if one["in"] == "query"),
            body_types,
        )
        for path, calls in app.openapi()["paths"].items()
        for method, call in calls.items()
        for body_types in _forms(frozenset(call.get("requestBody", {}).get("content", ())))
    ]


def _forms(types: frozenset[str]) -> list[frozenset[str]]:
    """A route that takes JSON, and its other form, are two ways in."""
    return [types & {JSON}, types - {JSON}] if types > {JSON} else [types]


ROUTES = [route for route in _routes() if (route.method, route.path) != REVOKE]


def send(client: httpx.Client, route: Route, ids: dict[str, str], victim: Victim, key: str | None) -> httpx.Response:
    """One request to a route: with these ids in its path, query and body, and this key or none but the client's."""
    path = route.path
    for name in route.path_names:
        path = path.replace(f"{{{name}}}", quote(ids.get(_ID_OF_PARAMETER.get(name, ""), "x"), safe=""))
    query = {name: ids[_ID_OF_PARAMETER[name]] for name in route.query_names if name in _ID_OF_PARAMETER}
    attacker = replace(victim, ids=ids)
    headers = ASIDE | ({} if key is None else {"X-API-Key": key}) | {"X-Twinkle-Session-Id": ids["$session"]}
    url = f"{path}?{urlencode(query)}" if query else path
    if not route.body_types:
        return client.request(route.method, url, headers=headers)
    if JSON in route.body_types:
        return client.request(route.method, url, json=attacker.filled(BODIES[route.path]), headers=headers)
    headers["content-type"] = next(iter(route.body_types))
    return client.request(route.method, url, content=passes(ids["$run"], 1), headers=headers)


def ids_of_nothing(victim: Victim) -> dict[str, str]:
    """Ids of the same form as the victim's, of nothing that exists."""
    session = victim.ids["$session"]
    made = {name: text.replace(session, _NOBODYS) for name, text in victim.ids.items()}
    made["$processor"] = PROCESSOR_PREFIX + "0" * len(made["$processor"].removeprefix(PROCESSOR_PREFIX))
    return made | {name: victim.ids[name] for name in _PUBLIC}
