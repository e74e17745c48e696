"""Processors in memory, made by their recipes: rebuilt anywhere in an epoch they give the same rows as undisturbed."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.models import make_text_model
from harness.processors import Desk
from twinkle.core.errors import LimitReached
from twinkle.core.processors import Effect
from twinkle.dataset.workspace import Workspace, bytes_below
from twinkle.workers.processors.children import Children
from twinkle.workers.processors.orders import Order, Recipe, Sources, Step

ROWS = [{"nums": [n, n + 1, n + 2], "target": 3 * n + 3} for n in range(11)]
TEMPLATE = {"template_func": "Qwen3_5Template", "model_id": "ms://Qwen/Qwen3.5-4B"}
META = json.dumps({"data": ROWS, "_TWINKLE_TYPE_": "DatasetMeta"})


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def _countdown(desk: Desk, **loading: Any) -> tuple[str, str]:
    dataset = desk.create("dataset", "Dataset", dataset_meta=META)
    desk.call(dataset, "map", preprocess_func="CountdownProcessor", dataset_meta=None, init_args=None)
    return dataset, desk.create("dataloader", "DataLoader", dataset=dataset, **loading)


def _rest(desk: Desk, loader: str) -> list[Any]:
    batches = []
    while (batch := desk.next(loader)) is not None:
        batches.append(batch)
    return batches


@pytest.mark.parametrize("num_taken", [0, 1, 2, 3])
@pytest.mark.parametrize("loading", [{}, {"shuffle": True, "seed": 7}])
def test_a_loader_made_anew_in_the_middle_of_an_epoch_gives_the_batches_that_were_to_come(
    desk: Desk, num_taken: int, loading: dict[str, Any]
) -> None:
    _, calm = _countdown(desk, batch_size=4, **loading)
    _, struck = _countdown(desk, batch_size=4, **loading)
    for loader in (calm, struck):
        for _ in range(2):
            desk.call(loader, "__iter__")
            if loader == calm:
                whole = _rest(desk, calm)
            else:
                found = [desk.next(struck) for _ in range(num_taken)]
                desk.forget_everything()
                found += _rest(desk, struck)
        if loader == struck:
            assert found == whole
            assert [len(batch) for batch in found] == [4, 4, 3]
    assert desk.call(calm, "get_state") == desk.call(struck, "get_state")


def test_a_pass_left_early_is_over_also_for_a_loader_that_was_made_anew(desk: Desk) -> None:
    _, calm = _countdown(desk, batch_size=4, shuffle=True, seed=1)
    _, struck = _countdown(desk, batch_size=4, shuffle=True, seed=1)
    for loader in (calm, struck):
        desk.call(loader, "__iter__")
        desk.next(loader)
        if loader == struck:
            desk.forget_everything()
        desk.call(loader, "__iter__")
        if loader == struck:
            desk.forget_everything()
    assert _rest(desk, struck) == _rest(desk, calm)


def test_a_loader_goes_on_where_a_run_before_has_stopped(desk: Desk) -> None:
    _, loader = _countdown(desk, batch_size=4)
    desk.call(loader, "__iter__")
    whole = _rest(desk, loader)
    _, resumed = _countdown(desk, batch_size=4)
    desk.call(resumed, "resume_from_checkpoint", consumed_train_samples=4)
    assert desk.call(resumed, "get_state") == {"consumed_train_samples": 4}
    desk.call(resumed, "__iter__")
    assert _rest(desk, resumed) == whole[1:]


def test_every_batch_says_how_many_rows_have_been_handed_out(desk: Desk) -> None:
    _, loader = _countdown(desk, batch_size=4)
    desk.call(loader, "__iter__")
    assert [desk.answer(loader, "__next__")["consumed_train_samples"] for _ in range(3)] == [4, 8, 11]


def test_an_iterator_that_has_no_more_says_so_again_and_again(desk: Desk) -> None:
    _, loader = _countdown(desk, batch_size=11)
    desk.call(loader, "__iter__")
    assert len(desk.next(loader)) == 11
    for _ in range(2):
        assert desk.next(loader) is None
        desk.forget_everything()


def test_a_loader_does_not_see_what_is_done_to_its_data_set_during_an_iteration_but_before_the_next(
    desk: Desk,
) -> None:
    dataset, loader = _countdown(desk, batch_size=4)
    desk.call(loader, "__iter__")
    before = desk.next(loader)
    desk.call(dataset, "add_dataset", dataset_meta=json.dumps({"data": ROWS[:2]}))
    desk.call(dataset, "map", preprocess_func="CountdownProcessor")
    desk.call(dataset, "mix_dataset", interleave=False)
    assert [len(batch) for batch in _rest(desk, loader)] == [4, 3]
    desk.call(loader, "__iter__")
    again = _rest(desk, loader)
    assert again[0] == before
    assert sum(map(len, again)) == 13
    assert desk.call(loader, "__len__") == 4


@pytest.mark.parametrize("class_type", ["Dataset", "IterableDataset"])
def test_rows_of_a_data_set_come_one_by_one_from_wherever_it_stood(desk: Desk, class_type: str) -> None:
    dataset = desk.create("dataset", class_type, dataset_meta=META)
    desk.call(dataset, "__iter__")
    found = [desk.next(dataset) for _ in range(3)]
    desk.forget_everything()
    found += _rest(desk, dataset)
    assert found == ROWS


def test_rows_are_encoded_by_the_tokenizer_of_the_served_model(tmp_path: Path) -> None:
    desk = Desk(tmp_path, models={"Qwen/Qwen3.5-4B": str(make_text_model(tmp_path / "model"))})
    dataset = desk.create("dataset", "Dataset", dataset_meta=META)
    desk.call(dataset, "set_template", **TEMPLATE, max_length=64)
    desk.call(dataset, "map", preprocess_func="CountdownProcessor")
    refused = desk.refused(dataset, "encode", add_generation_prompt=True, batched=True)
    assert "max_length" in refused.message or "64" in refused.message
    desk.call(dataset, "set_template", **TEMPLATE, max_length=9000)
    desk.call(dataset, "encode", add_generation_prompt=True, batched=True)
    row = desk.call(dataset, "__getitem__", idx=0)
    assert row["input_ids"] and row["messages"] and row["user_data"]
    desk.forget_everything()
    assert desk.call(dataset, "__getitem__", idx=0) == row


def test_a_change_that_fails_leaves_the_data_set_as_it_was(desk: Desk) -> None:
    dataset = desk.create("dataset", "Dataset", dataset_meta=META)
    desk.refused(dataset, "map", preprocess_func="GSM8KProcessor")
    assert desk.call(dataset, "__getitem__", idx=1) == ROWS[1]
    desk.call(dataset, "map", preprocess_func="CountdownProcessor")
    assert "messages" in desk.call(dataset, "__getitem__", idx=1)


def _path(_: Desk, secret: Path) -> str:
    return str(secret)


def _with_scheme(_: Desk, secret: Path) -> str:
    return f"ms://{secret}"


def _upwards(_: Desk, secret: Path) -> str:
    return f"../../{secret.name}"


@pytest.mark.parametrize("named", [_path, _with_scheme, _upwards])
def test_no_file_of_the_server_is_read(desk: Desk, tmp_path: Path, named: Callable[[Desk, Path], str]) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"password": "open sesame"}\n')
    refused = desk.refused_creation("dataset", "Dataset", dataset_meta=json.dumps({"dataset_id": named(desk, secret)}))
    assert "sesame" not in refused.message
    assert "upload" in refused.message or "dataset_id" in refused.message


def test_a_folder_that_the_operator_has_opened_is_read_but_not_what_links_lead_to(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "rows.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "secret.jsonl").write_text('{"a": 2}\n')
    (tmp_path / "open" / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    desk = Desk(tmp_path / "desk", folders=(str(tmp_path / "open"),))
    dataset = desk.create("dataset", "Dataset", dataset_meta=str(tmp_path / "open" / "rows.jsonl"))
    assert desk.call(dataset, "__getitem__", idx=0) == {"a": 1}
    desk.refused_creation("dataset", "Dataset", dataset_meta=str(tmp_path / "open" / "link.jsonl"))


def test_code_of_a_plugin_runs_only_where_the_operator_has_named_it(desk: Desk, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    (plugin / "__init__.py").write_text("raise SystemExit('it ran')")
    dataset = desk.create("dataset", "Dataset", dataset_meta=META)
    for name in (f"ms://{plugin}", "ms://org/plugin@v1", "os.system", f"file://{plugin}"):
        assert "it ran" not in desk.refused(dataset, "map", preprocess_func=name).message


def test_what_is_wrong_with_a_row_is_told_without_a_folder_of_the_server(desk: Desk, tmp_path: Path) -> None:
    file = desk.file("mine.jsonl", '{"nums": [1], "target": 1}\n{"nums": 3, "target": 1}\n')
    dataset = desk.create("dataset", "Dataset", dataset_meta=file)
    refused = desk.refused(dataset, "map", preprocess_func="CountdownProcessor")
    assert "mine.jsonl:2" in refused.message
    assert str(tmp_path) not in refused.message


def test_rewards_templates_and_preprocessors_are_called_with_what_a_client_sends(desk: Desk) -> None:
    reward = desk.create("reward", "GSM8KAccuracyReward")
    said = [{"messages": [{"role": "assistant", "content": f"#### {n}"}]} for n in (1, 2)]
    assert desk.call(reward, "__call__", trajectories=said, ground_truths=["1", "3"]) == [1.0, 0.0]
    preprocessor = desk.create("preprocessor", "SelfCognitionProcessor", model_name="N", model_author="A")
    rows = desk.call(preprocessor, "__call__", rows=[{"query": "Who?", "response": "{{NAME}}"}])
    assert rows[0]["messages"][-1]["content"] == "N"
    processor = desk.create("processor", "InputProcessor", padding_free=False)
    batch = desk.call(processor, "__call__", inputs=[{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    assert batch["input_ids"] == [[1, 2, 3], [4, 0, 0]]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("__call__", {"trajectories": "no", "ground_truths": None}),
        ("__call__", {"trajectories": [1], "ground_truths": None}),
        ("__call__", {"trajectories": [{}], "ground_truths": {"a": 1}}),
    ],
)
def test_nonsense_is_refused_in_words(desk: Desk, method: str, arguments: dict[str, Any]) -> None:
    reward = desk.create("reward", "GSM8KAccuracyReward")
    try:
        desk.call(reward, method, **arguments)
    except AssertionError:
        assert desk.refused(reward, method, **arguments).code == "invalid_input"


def _lines(num_rows: int) -> str:
    return "".join(json.dumps({"nums": [n, 1, 2], "target": n, "text": "x" * 100}) + "\n" for n in range(num_rows))


def test_what_is_not_in_use_gives_way_on_the_disk_and_is_made_anew_when_it_is_asked(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    files = [desk.file(f"{name}.jsonl", _lines(600)) for name in "ab"]
    sets = []
    gc.collect()
    before_bytes = Workspace.bytes_held()
    for file in files:
        sets.append(desk.create("dataset", "Dataset", dataset_meta=json.dumps({"dataset_id": file})))
        desk.call(sets[-1], "map", preprocess_func="CountdownProcessor", remove_columns=["text"])
        of_one_bytes = bytes_below(tmp_path / "room") + Workspace.bytes_held() - before_bytes
        desk.disk_bytes = before_bytes + of_one_bytes * 3 // 2
    held = [path.name for path in (tmp_path / "room").rglob("*.jsonl")]

    assert held == ["b.jsonl"]
    assert [desk.call(one, "__len__") for one in sets] == [600, 600]


def test_a_data_set_that_does_not_fit_on_the_disk_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    desk = Desk(tmp_path, disk_bytes=50_000)
    file = desk.file("large.jsonl", _lines(600))

    refused = desk.refused_creation("dataset", "Dataset", dataset_meta=json.dumps({"dataset_id": file}))

    assert "and 50000 may be held" in refused.message and "TWINKLE_PROCESSOR_DISK_BYTES" in refused.message
    assert not list((tmp_path / "room").rglob("*.jsonl"))


async def test_a_reward_has_a_limit_of_its_own_and_its_process_and_folder_go_with_it(tmp_path: Path) -> None:
    children = Children(1, folder=tmp_path / "f", call_s=60, reward_s=0.001, memory_bytes=2**40, idle_s=60)
    child = children.free_for("t")
    assert child is not None
    child.folder.mkdir(parents=True)
    order = Order(
        processor="pid:0",
        processor_type="reward",
        class_type="MathReward",
        step=Step(seq=1, method="__call__", arguments={"trajectories": []}),
        effect=Effect.ASKS,
        recipe=Recipe(),
        uses={},
        sources=Sources(),
        object_store="",
        folder="",
        disk_bytes=1,
    )

    with pytest.raises(LimitReached, match=r"a reward \(MathReward\) took more than 0.001 s.*PROCESSOR_REWARD_S"):
        await children.perform(child, order)

    assert children.num_running == 0 and not child.folder.exists()
