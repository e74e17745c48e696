"""A session's trace through the API: asked for with a key, read without one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
from tinker import types

from harness.calls import optim_step
from twinkle.server.access.signing import Signer, secret_of

if TYPE_CHECKING:
    from conftest import Api

PROMPT, PARAMS = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=2)


def _export(http: httpx.Client, session_id: str) -> str:
    told = http.get(f"/sessions/{session_id}/trace_export").json()
    assert told["status"] == "ready"
    return str(told["url"])


def test_the_sdk_exports_what_its_session_did(api: Api, key: str) -> None:
    with api.sdk(key) as service:
        training = service.create_lora_training_client(base_model="tiny/one", rank=4)
        training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        sampling = training.save_weights_and_get_sampling_client()
        for future in [sampling.sample(PROMPT, 1, PARAMS) for _ in range(3)]:
            future.result()
        rest = service.create_rest_client()
        session_id = training.get_info().model_id.split(":")[0]
        url = rest.export_session_trace(session_id).result()

    got = httpx.get(url)
    packets = Trace.FromString(got.content).packet
    events = [packet.track_event for packet in packets if packet.HasField("track_event")]
    names = {packet.track_descriptor.name for packet in packets if packet.HasField("track_descriptor")}

    assert {"session", "train:0", "sample:0", "running", "waiting"} <= names
    began = Counter(event.name for event in events if "running" in event.categories)
    assert began == {"create_model": 1, "optim_step": 1, "save_weights_for_sampler": 1, "sample": 3}
    assert sum(event.type == TrackEvent.TYPE_SLICE_END for event in events) == sum(
        event.type == TrackEvent.TYPE_SLICE_BEGIN for event in events
    ), "all has ended, the session too"
    assert got.headers["content-disposition"] == f'attachment; filename="{session_id}.pftrace"'


def test_a_session_of_somebody_else_is_as_unknown_as_one_that_is_not(api: Api, http: httpx.Client) -> None:
    with api.http(api.new_key()) as other:
        foreign = other.post("/create_session", json={}).json()["session_id"]

    refused = [http.get(f"/sessions/{session}/trace_export") for session in (foreign, "nobody")]

    assert [answer.status_code for answer in refused] == [404, 404]
    assert refused[0].text.replace(foreign, "nobody") == refused[1].text


def test_a_tampered_url_opens_nothing_and_a_whole_one_ends_with_its_time(
    api: Api, http: httpx.Client, session_id: str
) -> None:
    url = _export(http, session_id)
    expires = int(parse_qs(urlsplit(url).query)["expires"][0])
    signature = parse_qs(urlsplit(url).query)["signature"][0]
    other = http.post("/create_session", json={}).json()["session_id"]
    common = api.state().common
    # The same secret makes both: one that has ended, and one for something else.
    signer = Signer(secret_of(common.settings))
    past = int(common.clock.now()) - 1
    ended = urlencode({"expires": past, "signature": signer.sign("download of a trace", session_id, past)})
    of_another_kind = signer.sign("download of a file", session_id, expires)

    tampered = [
        url.replace(session_id, other),
        url.replace(f"expires={expires}", f"expires={expires + 1}"),
        url.replace(signature, signature[::-1]),
        f"{url.partition('?')[0]}?{ended}",
        url.replace(signature, of_another_kind),
    ]

    assert httpx.get(url).status_code == 200
    assert [httpx.get(one).status_code for one in tampered] == [403] * len(tampered)


def test_a_session_that_did_nothing_has_a_trace_too(http: httpx.Client, session_id: str) -> None:
    packets = Trace.FromString(httpx.get(_export(http, session_id)).content).packet

    assert [packet.track_event.name for packet in packets if packet.HasField("track_event")] == [
        "session",
        "last heartbeat",
        "trace made",
    ]


def test_what_has_not_ended_has_an_open_end(api: Api, http: httpx.Client, session_id: str, model_id: str) -> None:
    with api.worker.paused():
        for seq_id in (1, 2):
            assert http.post("/optim_step", json=optim_step(model_id, seq_id)).status_code == 200
        packets = Trace.FromString(httpx.get(_export(http, session_id)).content).packet

    events = [packet.track_event for packet in packets if packet.HasField("track_event")]
    ended = {event.track_uuid for event in events if event.type == TrackEvent.TYPE_SLICE_END}
    waiting = [event.name for event in events if "waiting" in event.categories and event.track_uuid not in ended]
    assert waiting == ["waiting_for_predecessor"]
