"""What the account says was used, against what a client counted itself."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import tinker

from harness.sdk_command_line import run_tinker
from harness.served import Served
from twinkle.core.clock import SystemClock
from twinkle.storage.sampling.sampling_sessions import Patience
from twinkle.storage.stores import Stores

HOUR = timedelta(hours=1)


def datum_of(length: int) -> tinker.Datum:
    tokens = list(range(5, 5 + length))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": tokens, "weights": [1.0] * length},
    )


def window() -> tuple[datetime, datetime]:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return hour - HOUR, hour + 2 * HOUR


def told_by_the_command_line(served: Served, key: str, home: Path) -> list[dict[str, object]]:
    start, end = (f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in window())
    arguments = ("--format", "json", "billing", "usage", start, end)
    printed = run_tinker(*arguments, base_url=served.url, api_key=key, home=home)
    return list(json.loads(printed)["data"])


@dataclass(frozen=True)
class Nameless:
    size_bytes: int
    lived_s: float


def nameless_weights(served: Served) -> Nameless:
    """What was saved for a sampling client without a name, ended with the session that was finished."""
    stores = Stores.at(f"sqlite:///{served.home}/journal.db", SystemClock())
    stores.sampling_sessions.end_unreachable(Patience(idle_s=1e9, silent_s=1e9))
    stores.close()
    ((size_bytes, opened_at, ended_at),) = served.query(
        "SELECT e.size_bytes, e.opened_at, e.ended_at FROM ephemeral_weights e JOIN tenant t ON t.id = e.tenant"
        " WHERE t.name = 'accounted'"
    )
    return Nameless(size_bytes, ended_at - opened_at)


def test_usage_is_what_was_trained_prefilled_sampled_and_stored(served: Served, tmp_path: Path) -> None:
    key = served.create_key("accounted")
    began = time.time()
    with tinker.ServiceClient(base_url=served.url, api_key=key) as service:
        run = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        for lengths in ((5, 3, 9), (4,)):
            run.forward_backward([datum_of(length) for length in lengths], "cross_entropy").result()
        run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        run.forward([datum_of(6)], "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError):
            run.forward([datum_of(8)], "no_such_loss").result()
        prompts = [tinker.ModelInput.from_ints(range(5, 5 + length)) for length in (4, 7)]
        params = tinker.SamplingParams(max_tokens=6, temperature=1.0, seed=1)
        samplers = [
            run.save_weights_and_get_sampling_client(),
            service.create_sampling_client(base_model="tiny").result(),
        ]
        answers = [sampler.sample(prompt, 3, params) for sampler in samplers for prompt in prompts]
        num_sampled = sum(len(sequence.tokens) for one in answers for sequence in one.result().sequences)
        path = run.save_state("kept").result().path
        rest = service.create_rest_client()
        (kept,) = rest.list_checkpoints(run.model_id).result().checkpoints
        admin = tinker.AdminClient(base_url=served.url, api_key=key)
        stored = admin.get_current_checkpoint_storage_usage().result().data
        at_least_s = time.time() - kept.time.timestamp()
        rest.delete_checkpoint_from_tinker_path(path).result()
    deleted = time.time()
    nameless = nameless_weights(served)
    events = admin.get_billing_usage(*window()).result().data
    audited = admin.get_audit_log(event_type="checkpoints").result().entries

    told: Counter[str] = Counter()
    for event in events:
        info = event.event_info
        told[info.type] += sum(getattr(info, name, 0) for name in ("token_count", "count", "gigabyte_hours"))
    storage = told.pop("storage")
    assert told == {
        "training": 5 + 3 + 9 + 4 + 6,
        "sampling_prefill": 2 * (4 + 7),
        "sampling_sample": num_sampled,
        "checkpoint": 2,
    }
    assert [(item.checkpoint_count, item.size_bytes) for item in stored] == [(2, kept.size_bytes + nameless.size_bytes)]
    lived_s = (storage * 3600 * 1e9 - nameless.size_bytes * nameless.lived_s) / kept.size_bytes
    assert at_least_s - 0.1 < lived_s < deleted - kept.time.timestamp() + 0.1
    assert [entry.event for entry in audited if entry.tinker_path == path] == ["checkpoint_create", "checkpoint_delete"]
    by_command_line = told_by_the_command_line(served, key, tmp_path)
    assert sorted(str(row["event_info"]) for row in by_command_line) == sorted(
        str(event.event_info.model_dump(mode="json")) for event in events
    )
    # The SDK passes over what a device was busy for.
    params = dict(zip(("starting_on", "ending_before"), (at.isoformat() for at in window()), strict=True))
    raw = httpx.get(f"{served.url}/api/v1/billing/usage/events", params=params, headers={"X-API-Key": key}).json()
    device_s = {row["event_info"]["type"]: row.get("device_seconds", 0.0) for row in raw["data"]}
    assert device_s["training"] > 0 < device_s["sampling_sample"]
    assert sum(device_s.values()) < deleted - began
