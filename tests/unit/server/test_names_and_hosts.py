"""Attacks with names: those that break tools later are refused when they are made, and no answer repeats a Host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx
import pytest

from harness.calls import retrieve
from harness.fake_worker import BASE_MODEL
from twinkle.core.settings import Settings

if TYPE_CHECKING:
    from conftest import Api, ServeApi

ODD = ["--help", "-rf", "a\nb", "a\x1b[2Jb", "a\u00a0b", "a\u202eb", "a\u200bb", " a", "a ", "a%2Fb", "..%2f"]
IDS = [ascii(name) for name in ODD]


@pytest.mark.parametrize("name", ODD, ids=IDS)
def test_odd_names_are_refused_by_field_when_something_is_called_so(
    api: Api, http: httpx.Client, session_id: str, model_id: str, name: str
) -> None:
    native = f"{api.url}/api/native/v1"
    answers = {
        "project_id": http.post("/create_session", json={"project_id": name}),
        "display_name": http.post("/create_session", json={"display_name": name}),
        "project": http.put(f"/sessions/{session_id}/project", json={"project_id": name}),
        "job": http.post(f"{native}/jobs", json={"kind": "ops", "spec": {}, "name": name}),
        "token": http.post(f"{native}/access_tokens", json={"training_run_id": model_id, "name": name}),
        "upload": http.post(f"{native}/uploads", json={"filename": name, "purpose": "batch", "bytes": 1}),
        "file": http.post(f"{api.url}/v1/files", files={"file": (name, b"{}")}, data={"purpose": "fine-tune"}),
        "adapter": http.post(
            f"/model/{BASE_MODEL}/twinkle/add_adapter_to_model",
            json={"adapter_name": name},
            headers={"X-Twinkle-Session-Id": session_id},
        ),
    }
    # What a form's file name cannot hold does not arrive.
    if any(ord(char) < 32 for char in name):
        del answers["file"]

    assert {where: answer.status_code for where, answer in answers.items()} == dict.fromkeys(answers, 400)
    assert [where for where, answer in answers.items() if "must not " not in answer.text] == []


def test_a_checkpoint_is_not_called_like_an_option(http: httpx.Client, model_id: str) -> None:
    ticket = http.post("/save_weights", json={"model_id": model_id, "seq_id": 1, "path": "--help"}).json()
    told = retrieve(http, ticket["request_id"]).json()

    assert "may not begin with '-'" in told["error"]


def _saved(api: Api, http: httpx.Client, model_id: str) -> str:
    ticket = http.post("/save_weights_for_sampler", json={"model_id": model_id, "seq_id": 1, "path": "a"}).json()
    retrieve(http, ticket["request_id"])
    return f"/training_runs/{model_id}/checkpoints/sampler_weights/a/archive"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1:1", "localhost"])
def test_a_host_from_outside_never_comes_back(
    api: Api, http: httpx.Client, session_id: str, model_id: str, host: str
) -> None:
    trace = http.get(f"/sessions/{session_id}/trace_export", headers={"Host": host, "X-Forwarded-Host": host})
    archive = http.get(_saved(api, http, model_id), headers={"Host": host}, follow_redirects=False)

    assert trace.json()["url"].startswith(f"{api.url}/api/v1/traces/")
    for told in (trace, archive):
        assert host not in told.text.replace(api.url, "") + told.headers.get("location", "").replace(api.url, "")


def test_where_everybody_can_reach_us_the_operator_must_say_under_which_name(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    wide = {"host": "0.0.0.0", "allowed_hosts": ["Queue.example:8443"]}
    with serve_api(make_database_url("sqlite"), **wide) as api, api.http(api.new_key()) as client:
        session = client.post("/create_session", json={}).json()["session_id"]
        told = {
            host: client.get(f"/sessions/{session}/trace_export", headers={"Host": host})
            for host in ("evil.example", "queue.example:8443", api.url.removeprefix("http://"))
        }

    refused, named, reached = told.values()
    assert refused.status_code == 400 and "TWINKLE_PUBLIC_URL" in refused.json()["detail"]
    assert named.json()["url"].startswith("http://queue.example:8443/api/v1/traces/")
    assert reached.json()["url"].startswith(f"{api.url}/api/v1/traces/")


@pytest.mark.parametrize("headers", [{"Host": "queue.example"}, {"X-Forwarded-For": "10.0.0.7"}, {"Via": "1.1 proxy"}])
def test_the_folder_of_a_model_is_told_to_nobody_who_is_not_on_its_machine(
    http: httpx.Client, model_id: str, headers: dict[str, str]
) -> None:
    info = http.post("/get_info", json={"model_id": model_id}, headers=headers)

    assert info.status_code == 200
    assert "/srv/models" not in info.text


@pytest.mark.parametrize(
    "settings",
    [
        {"public_url": "https://queue.example"},
        {"tell_model_folder": Settings.model_fields["tell_model_folder"].default},
    ],
    ids=["with a public name", "by default"],
)
def test_nor_where_the_server_has_a_public_name_or_is_not_told_to(
    serve_api: ServeApi, make_database_url: Callable[[str], str], settings: dict[str, object]
) -> None:
    with serve_api(make_database_url("sqlite"), **settings) as api:
        api.worker.start()
        with api.http(api.new_key()) as client:
            session = client.post("/create_session", json={}).json()["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
            ticket = client.post("/create_model", json=body).json()
            retrieve(client, ticket["request_id"])
            info = client.post("/get_info", json={"model_id": ticket["model_id"]})
        api.worker.stop()

    assert info.status_code == 200 and "/srv/models" not in info.text
