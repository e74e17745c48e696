"""A job's request is taken whole or refused by the name of what is wrong in it, before anything is stored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.jobs import JobRequest, JobsRequest, published_schema
from twinkle.wire.bodies.jobs_base import parse_part
from twinkle.wire.bodies.jobs_specs import SPECS, parse_spec

OPS = {"model": "tiny/one", "data": "file-1"}


def _request(**fields: Any) -> JobRequest:
    return parse_part(JobRequest, json.dumps({"kind": "ops", "spec": OPS, **fields}).encode())


def test_what_is_left_out_has_the_documented_defaults() -> None:
    job = _request()

    assert (job.max_attempts, job.priority, job.after, job.dry_run) == (3, None, (), False)
    assert parse_spec("ops", job.spec).model_dump(mode="json")["rank"] == 32


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"kid": "ops"}, "kid", "did you mean kind?"),
        ({"zzzz": 1}, "zzzz", "known are after, client_id"),
        ({"client_id": "a/b"}, "client_id", "must be 1 to 128 letters"),
        ({"notify_url": "ftp://x"}, "notify_url", "http://"),
        ({"priority": 101}, "priority", "less than or equal to 100, not 101"),
        ({"max_attempts": 0}, "max_attempts", "greater than or equal to 1, not 0"),
        ({"after": [{"jobb": "x"}]}, "after[0].jobb", "did you mean job?"),
        ({"after": [{"job": "x", "condition": "later"}]}, "after[0].condition", "'ok' or 'any'"),
        ({"metadata": 3}, "metadata", "not a whole number"),
    ],
)
def test_a_wrong_field_of_the_envelope_is_named_with_what_was_meant(
    fields: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        _request(**fields)

    assert refused.value.field == field
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        ({**OPS, "windwo": 3}, "spec.windwo", "did you mean window?"),
        ({**OPS, "rank": "3"}, "spec.rank", "not a text"),
        ({"model": "tiny/one"}, "spec.data", "is missing"),
        ({**OPS, "data": "/etc/passwd"}, "spec.data", "not a path"),
    ],
)
def test_a_wrong_field_of_a_spec_is_named_with_its_whole_path(spec: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_spec("ops", spec)

    assert refused.value.field == field
    assert words in refused.value.message


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidInput, match=r"kind: 'oops' is none of .*ops"):
        parse_spec("oops", {})


def test_a_dependency_is_an_id_or_an_id_with_a_condition() -> None:
    job = _request(after=["job-1", {"job": "job-2", "condition": "any"}])

    assert [(one.job, one.condition) for one in job.after] == [("job-1", "ok"), ("job-2", "any")]


def test_two_jobs_of_one_request_cannot_have_the_same_client_id() -> None:
    one = {"kind": "ops", "spec": OPS, "client_id": "a"}

    with pytest.raises(InvalidInput, match=r"jobs\[1\] has the client_id of another one"):
        parse_part(JobsRequest, json.dumps({"jobs": [one, one]}).encode())


def test_the_published_schema_has_the_spec_of_every_kind_and_takes_no_unknown_keys() -> None:
    schema = published_schema()

    assert schema["properties"]["kind"]["enum"] == sorted(SPECS)
    assert schema["additionalProperties"] is False
    for spec_class in SPECS.values():
        definition = schema["$defs"][spec_class.__name__]
        assert definition["additionalProperties"] is False
        assert set(spec_class.model_fields) == set(definition["properties"])
    json.dumps(schema)
