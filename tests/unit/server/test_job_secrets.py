"""Secrets in jobs' specs: sealed on their way to the database, left out of what is told, opened for nobody else."""

import json
import secrets

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.server.access.sealing import SHOWN, Sealer, shown
from twinkle.server.access.signing import Signer

SPEC = {"kind": "export", "to": "hf://me/mine", "hub_token": "canary"}


@pytest.fixture
def sealer():
    return Sealer(Signer(b"the deployment's secret"))


def test_what_was_sealed_is_opened_for_the_same_tenant_by_the_same_deployment_alone(sealer):
    sealed = sealer.sealed(SPEC, "alice")

    assert "canary" not in json.dumps(sealed)
    assert sealer.open(sealed["hub_token"], "alice").get_secret_value() == "canary"
    for other, tenant in ((sealer, "bob"), (Sealer(Signer(b"another secret")), "alice")):
        with pytest.raises(InvalidInput, match="submit it again"):
            other.open(sealed["hub_token"], tenant)


def test_the_same_secret_is_sealed_the_same_and_never_twice(sealer):
    sealed = sealer.sealed(SPEC, "alice")

    assert sealer.sealed(SPEC, "alice") == sealed == sealer.sealed(sealed, "alice")
    assert sealer.sealed(SPEC, "bob") != sealed


def test_secrets_are_found_however_deep_they_stand_and_are_not_shown(sealer):
    flow = {
        "jobs": {"out": {"spec": SPEC}},
        "others": [{"credentials": {"secret_access_key": "canary", "region": "x"}}],
    }

    sealed = sealer.sealed(flow, "alice")

    assert "canary" not in json.dumps(sealed)
    assert shown(sealed)["jobs"]["out"]["spec"] == {**SPEC, "hub_token": SHOWN}
    assert shown(sealed)["others"] == [{"credentials": {"secret_access_key": SHOWN, "region": "x"}}]


def test_a_text_that_only_looks_sealed_is_a_secret_like_any_other(sealer):
    theirs = sealer.sealed(SPEC, "bob")["hub_token"]

    mine = sealer.sealed({"hub_token": theirs}, "alice")["hub_token"]

    assert mine != theirs and sealer.open(mine, "alice").get_secret_value() == theirs


def test_a_token_is_in_no_answer_and_a_resent_job_is_the_same_one(http):
    canary = f"canary-{secrets.token_hex(8)}"
    spec = {"checkpoint": "tinker://run/weights/best", "to": "hf://me/mine", "hub_token": canary}
    body = {"kind": "export", "spec": spec, "client_id": f"out-{secrets.token_hex(4)}"}
    jobs = http.base_url.join("/api/native/v1/jobs")

    created = http.post(jobs, json=body)
    again = http.post(jobs, json=body)
    other = http.post(jobs, json={**body, "spec": {**spec, "hub_token": "another"}})
    listed = http.get(jobs)
    wrong = http.post(jobs, json={**body, "spec": {**spec, "forms": ["peft", "gguf"]}})

    assert created.status_code == 200, created.text
    assert created.json()["id"] == again.json()["id"] and other.status_code == 400
    assert created.json()["spec"]["hub_token"] == SHOWN
    assert wrong.status_code in (400, 422) and "one form" in wrong.text
    for answer in (created, again, other, listed, wrong):
        assert canary not in answer.text
