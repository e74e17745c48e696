"""The client of the package `twinkle-kit`, unmodified: each of its methods once against a real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.served import Served
from harness.twinkle_kit import Exercise, exercise, train_with_pinned_sdk
from harness.twinkle_table import NOT_SENT_BY_TWINKLE_KIT, TABLE

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

NOT_KNOWN = ("loss", "optimizer", "lr_scheduler", "template", "processor", "metric", "preprocessor")
WOULD_CHANGE_ALL = ("patch", "sampler_patch")
NAMES_A_PLACE = ("load", "adapter_uri", "dataset_path", "save_as", "flush_save")
NOT_OF_STREAMS = ("length_of_stream", "row_of_stream")
NOT_THERE = ("delete", "run")


@pytest.fixture(scope="module")
def done(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Exercise:
    return exercise(served.url, served.create_key("kit"), "tiny", tmp_path_factory.mktemp("kit"))


def test_it_trains_saves_resumes_and_samples(done: Exercise) -> None:
    seen = done.seen

    assert seen["forward"] == seen["reference"] == [4, 4]
    assert seen["losses"] == sorted(seen["losses"], reverse=True) and seen["losses"][0] == pytest.approx(seen["loss"])
    assert float(seen["grad_norm"]) > 0 and float(seen["metric"]["loss"]) > 0
    assert seen["progress"] == {"cur_step": 4, "consumed_train_samples": 8, "gradient_accumulation_steps": 1}
    assert seen["paths"] == ["step-1", True] and seen["same_path"] and seen["latest"]
    assert seen["checkpoints"] == ["sampler", "training"] and seen["step_1"] and seen["listed"] and seen["found"]
    assert seen["run"] == [True, True, True, 4] and seen["weights"] == [True, True, 4]
    assert seen["drawn"] == [2, 2] and seen["logprobs"] and seen["row"] and seen["talked"] == ["user", "assistant"]
    assert seen["upload"] in {"pending", "running"} and seen["deleted"]


def test_its_data_at_the_server_are_read_to_their_end(done: Exercise) -> None:
    assert done.seen["row_of_data"] == "I am N, number 0."
    assert (done.seen["rows"], done.seen["batches"]) == (6, [2, 2])
    assert done.seen["state"] == {"consumed_train_samples": 6}


def test_its_data_sets_of_every_other_class_are_made_and_read(done: Exercise) -> None:
    seen = done.seen

    assert seen["lazy"] == [6, True, 6]
    assert seen["packed"][1] > 1 and seen["packed"][0] < 6
    assert seen["streamed"] == ["What is 0?", 6], "a loop begins the stream anew"
    assert sorted(token for row in seen["packed_stream"] for token in row) == sorted([*range(1, 7)] * 2)
    assert all(len(row) == 4 for row in seen["packed_stream"])
    assert seen["batch"] == [[11, 12, 13, 14], [0, 21, 22, 23]]


def test_what_nobody_knows_or_may_name_is_refused_in_words(done: Exercise) -> None:
    others = (*NOT_OF_STREAMS, "filter", "cast_column")
    assert set(done.refused) == {*NOT_KNOWN, *WOULD_CHANGE_ALL, *NAMES_A_PLACE, *NOT_THERE, *others}
    assert all("is not known; use one of" in done.refused[name] for name in NOT_KNOWN)
    assert all("404 Error" in done.refused[name] for name in NOT_THERE)
    assert all("400 Error" in words for name, words in done.refused.items() if name not in NOT_THERE)
    assert not any("Traceback" in words for words in done.refused.values())


def test_it_asks_for_every_row_of_the_table_and_for_nothing_else(done: Exercise) -> None:
    rows = {" ".join(call.split()[:2]) for call in done.calls}

    assert rows == TABLE - NOT_SENT_BY_TWINKLE_KIT


def test_the_sdk_that_it_pins_trains_after_its_own_init(served: Served, tmp_path: Path) -> None:
    seen = train_with_pinned_sdk(served.url, served.create_key("pinned"), "tiny", tmp_path)

    assert seen["losses"] == sorted(seen["losses"], reverse=True) and seen["losses"][0] > seen["losses"][-1]
    assert seen["tokens"] == [4, 4] and len(seen["scored"]) == 3
    # The same weights score the same tokens, sampled or trained.
    assert seen["prompt"][0] is None
    assert seen["prompt"][1:] == pytest.approx(seen["scored"], abs=1e-5)
