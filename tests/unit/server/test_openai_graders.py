"""The routes that try a grader, through the official client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

from harness.byte_tokenizer import write_tokenizer
from harness.fake_worker import BASE_MODEL, CAPABILITIES, FakeWorker

if TYPE_CHECKING:
    from conftest import ServeApi

CHECK = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}
DIGIT = {"type": "regexp", "name": "digit", "pattern": "[0-9]"}
# The worker of these tests answers everything with the characters from ! on.
LABELS = {
    "type": "label_model",
    "name": "judge",
    "model": BASE_MODEL,
    "input": [{"role": "user", "content": "{{sample.output_text}}"}],
    "labels": ['!"#', "other"],
    "passing_labels": ['!"#'],
}


@pytest.fixture(scope="module")
def client(
    serve_api: ServeApi, make_database_url: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    with serve_api(make_database_url("sqlite"), max_outstanding_samples=100) as served:
        capabilities = CAPABILITIES.model_copy(update={"tokenizer_path": str(folder)})
        worker = FakeWorker(served.settings, capabilities=capabilities)
        worker.start()
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.new_key(), max_retries=0, timeout=30) as made:
            # The process for rewards starts with the first answer, and stays until the API ends.
            made.fine_tuning.alpha.graders.run(grader=DIGIT, model_sample="7")  # type: ignore[arg-type]
            yield made
        worker.stop()


def test_a_grader_is_run_on_an_answer(client: openai.OpenAI) -> None:
    run = client.fine_tuning.alpha.graders.run(grader=CHECK, model_sample="7", item={"answer": 7})  # type: ignore[arg-type]

    assert run.reward == 1.0
    assert run.sub_rewards == {"exact": 1.0}
    assert (run.metadata.name, run.metadata.type) == ("exact", "string_check")
    assert not any(value for name, value in run.metadata.errors.to_dict().items() if name.endswith("_error"))


OUTPUT = "{{sample.output_text}}"
SCORES: list[tuple[dict[str, Any], float]] = [
    ({"type": "string_check", "operation": "like", "input": OUTPUT, "reference": "4+3"}, 1.0),
    ({"type": "text_similarity", "input": OUTPUT, "reference": "4+3 = 7", "evaluation_metric": "rouge_l"}, 1.0),
    ({"type": "reward", "reward": "arithmetic", "reference": "{{item.answer}}"}, 1.0),
    ({"type": "reward", "reward": "arithmetic", "reference": "8"}, 0.0),
    ({"type": "regexp", "pattern": r"= (\d+)", "group": 1, "reference": "{{item.answer}}"}, 1.0),
    ({"type": "regexp", "pattern": "^7$"}, 0.0),
]


@pytest.mark.parametrize(("grader", "score"), SCORES)
def test_every_kind_without_a_model_gives_here_what_it_gives_in_jobs(
    client: openai.OpenAI, grader: dict[str, Any], score: float
) -> None:
    run = client.fine_tuning.alpha.graders.run(
        grader={**grader, "name": "tried"},  # type: ignore[arg-type]
        model_sample="4+3 = 7",
        item={"answer": 7},
    )

    assert run.reward == score
    assert not any(value for name, value in run.metadata.errors.to_dict().items() if name.endswith("_error"))


def test_what_fails_is_told_by_the_names_that_clients_know(client: openai.OpenAI) -> None:
    unread = {**CHECK, "reference": "{{item.missing}}"}
    parts: dict[str, Any] = {"exact": CHECK, "unread": unread}
    multi = {"type": "multi", "name": "both", "graders": parts, "calculate_output": "1 / (exact - 1)"}

    run = client.fine_tuning.alpha.graders.run(grader=multi, model_sample="7", item={"answer": 7})  # type: ignore[arg-type]

    assert (run.reward, run.sub_rewards) == (0.0, {"exact": 1.0, "unread": 0.0})
    assert run.metadata.errors.formula_parse_error
    assert run.metadata.errors.invalid_variable_error
    assert not run.metadata.errors.other_error


def test_a_served_model_judges_and_what_it_took_is_counted(client: openai.OpenAI) -> None:
    short = {**LABELS, "sampling_params": {"max_completions_tokens": 3}}
    unsure = {**LABELS, "name": "number", "type": "score_model", "sampling_params": {"max_completions_tokens": 2}}
    del unsure["labels"], unsure["passing_labels"]
    parts: dict[str, Any] = {"judge": short, "number": unsure}
    multi = {"type": "multi", "name": "both", "graders": parts, "calculate_output": "judge + number"}

    run = client.fine_tuning.alpha.graders.run(
        grader=multi,  # type: ignore[arg-type]
        model_sample="an answer",
        extra_headers={"Idempotency-Key": "judged twice"},
    )

    assert run.sub_rewards == {"judge": 1.0, "number": 0.0}
    assert run.metadata.errors.api_model_grader_parse_error
    assert run.metadata.sampled_model_name == BASE_MODEL
    assert run.metadata.token_usage == run.api_model_grader_token_usage_per_model[BASE_MODEL]
    assert run.metadata.token_usage is not None and run.metadata.token_usage > 5


def test_a_judge_that_is_not_served_is_an_error_of_the_grader(client: openai.OpenAI) -> None:
    run = client.fine_tuning.alpha.graders.run(grader={**LABELS, "model": "gpt-9"}, model_sample="x")  # type: ignore[arg-type]

    assert run.reward == 0
    assert run.metadata.errors.api_model_grader_server_error
    assert "gpt-9" in str(run.metadata.errors.api_model_grader_server_error_details)


def test_a_grader_is_validated_and_code_is_refused(client: openai.OpenAI) -> None:
    validated = client.fine_tuning.alpha.graders.validate(grader=CHECK)  # type: ignore[arg-type]

    assert validated.grader is not None and validated.grader.name == "exact"
    with pytest.raises(openai.BadRequestError, match="never code"):
        client.fine_tuning.alpha.graders.validate(grader={"type": "python", "name": "p", "source": "1"})
    with pytest.raises(openai.BadRequestError) as refused:
        client.fine_tuning.alpha.graders.run(grader={**CHECK, "refrence": "x"}, model_sample="x")  # type: ignore[arg-type]
    assert refused.value.param == "grader.string_check.refrence"
