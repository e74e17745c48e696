"""Encoded rows are laid together up to a length, and none sees another."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.rows import conversation, write_jsonl
from twinkle.core.errors import InvalidInput
from twinkle.dataloader import DataLoader
from twinkle.dataset import DatasetMeta, IterablePackingDataset, PackingDataset
from twinkle.dataset.bins import pack_lengths
from twinkle.processor import InputProcessor
from twinkle.template import Template

LENGTH = 160
ROWS = [conversation(n, 2 + n % 7) for n in range(40)]


@pytest.fixture
def template(template_folder: Path) -> Template:
    return Template(str(template_folder), max_length=LENGTH)


def packed(template: Template, kind: Any = PackingDataset, **settings: Any) -> Any:
    dataset = kind(DatasetMeta(data=ROWS), **settings)
    dataset.set_template(template)
    dataset.encode()
    return dataset


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 90))
def test_every_row_lies_in_one_bin_and_none_overflows(lengths: list[int], capacity: int) -> None:
    bins = pack_lengths(lengths, capacity)

    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in members) <= capacity for members in bins)
    # No two bins could be one: best fit leaves none of them half empty but the last.
    rooms = sorted(sum(lengths[number] for number in members) for members in bins)
    assert len(rooms) < 2 or rooms[0] + rooms[1] > capacity


def test_a_packed_row_has_at_most_max_length_tokens_and_together_all(template: Template) -> None:
    dataset = packed(template)
    alone = [template.encode(row)["length"] for row in ROWS]

    dataset.pack_dataset()

    lengths = [dataset[index]["length"] for index in range(len(dataset))]
    assert max(lengths) <= LENGTH
    assert sum(lengths) == sum(alone)
    assert len(dataset) <= -(-sum(alone) // LENGTH) * 1.25


def test_position_ids_begin_anew_with_every_member(template: Template) -> None:
    dataset = packed(template)
    dataset.pack_dataset()

    row = dataset[0]
    members = [template.encode(ROWS[number]) for number in dataset.members_of_rows[0]]

    assert len(members) > 1
    for name in ("input_ids", "labels", "attention_mask", "position_ids"):
        assert row[name] == [value for member in members for value in member[name].tolist()]
    assert set(row) == {"input_ids", "labels", "attention_mask", "position_ids", "length"}


def test_a_batch_of_packed_rows_is_its_members_to_the_model(template: Template) -> None:
    dataset = packed(template)
    dataset.pack_dataset()
    order = [number for members in dataset.members_of_rows for number in members]

    of_packed = InputProcessor()(list(dataset))
    of_rows = InputProcessor()([template.encode(ROWS[number]) for number in order])

    assert of_packed.lengths == of_rows.lengths
    assert torch.equal(of_packed.labels, of_rows.labels)
    for name, values in of_rows.model_inputs.items():
        assert torch.equal(of_packed.model_inputs[name], values)


def test_rows_are_not_taken_before_they_are_packed(template: Template) -> None:
    dataset = PackingDataset(DatasetMeta(data=ROWS))
    dataset.set_template(template)
    with pytest.raises(InvalidInput, match="call encode"):
        dataset.pack_dataset()
    dataset.encode()

    with pytest.raises(InvalidInput, match="call pack_dataset"):
        len(dataset)


@pytest.mark.parametrize("kind", [PackingDataset, IterablePackingDataset])
def test_texts_longer_than_a_packed_row_are_split_and_lose_no_target(template_folder: Path, kind: Any) -> None:
    settings: dict[str, Any] = {"use_chat_template": False, "truncation_strategy": "split"}
    texts = [{"text": "the lazy dog " * length} for length in (40, 3, 90, 7)]
    whole = [Template(str(template_folder), use_chat_template=False, max_length=None).encode(row) for row in texts]
    dataset = kind(DatasetMeta(data=texts))
    dataset.set_template(Template(str(template_folder), max_length=32, **settings))
    dataset.encode()
    dataset.pack_dataset()

    rows = list(dataset)

    assert all(row["length"] <= 32 for row in rows) and sum(row["length"] == 32 for row in rows) > 2
    found = sorted(label for row in rows for label in row["labels"] if label >= 0)
    assert found == sorted(label for row in whole for label in row["labels"].tolist() if label >= 0)


def test_raw_text_is_packed_too(template_folder: Path) -> None:
    dataset = PackingDataset(DatasetMeta(data=[{"text": f"the lazy dog {n}"} for n in range(20)]))
    dataset.set_template("Template", model_id=str(template_folder), use_chat_template=False, max_length=32)
    dataset.encode()

    dataset.pack_dataset()

    row = dataset[0]
    starts = [index for index, position in enumerate(row["position_ids"]) if position == 0]
    assert len(starts) > 1
    # The last token of a member has no successor of its own; the first of the next is none.
    assert all(row["labels"][start - 1] == -100 for start in starts[1:])


def test_every_long_phase_shows_a_bar_on_a_terminal(
    template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("twinkle.infra.progress.QUICK_S", 0.0)
    dataset = PackingDataset(DatasetMeta(str(write_jsonl(tmp_path / "rows.jsonl", ROWS))))
    dataset.set_template(template)
    dataset.map(lambda columns: {"more": [1] * len(columns["messages"])})
    dataset.filter(lambda row: row["more"] == 1)

    dataset.report()
    dataset.encode()
    dataset.pack_dataset()
    dataset.save_as(str(tmp_path / "packed.jsonl"))
    batches = list(DataLoader(dataset, batch_size=2))

    drawn = terminal.getvalue()
    for phase in ("mapped by <lambda>", "filtered by <lambda>", "report", "encoded", "pack"):
        assert re.search(rf"{phase}: 100%.* {len(ROWS)}/{len(ROWS)} .*rows", drawn), phase
    assert re.search(rf"save: 100%.* {len(dataset)}/{len(dataset)} ", drawn)
    assert re.search(rf"train: 100%.* {len(batches)}/{len(batches)} .*batches", drawn)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rows_with_sound_lie_with_no_other(template: Template) -> None:
    rows = [{**{name: values.tolist() for name, values in encoded.items() if name.endswith("ids")},
             "length": encoded["length"], "input_features": [[0.0]]}
            for encoded in [template.encode({"messages": conversation(1)["messages"]})]]  # fmt: skip
    dataset = PackingDataset(DatasetMeta(data=rows))

    with pytest.raises(InvalidInput, match="lies with no other"):
        dataset.pack_dataset()


def test_a_stream_is_packed_some_rows_at_a_time(template: Template) -> None:
    dataset = packed(template, IterablePackingDataset, packing_interval=8)

    rows = list(dataset)

    assert max(row["length"] for row in rows) <= LENGTH
    assert sum(row["length"] for row in rows) == sum(template.encode(row)["length"] for row in ROWS)
    assert sum(row["position_ids"].count(0) for row in rows) == len(ROWS)


def test_a_cyclic_stream_never_ends(template: Template) -> None:
    dataset = packed(template, IterablePackingDataset, packing_interval=8, cyclic=True)
    once = len(list(packed(template, IterablePackingDataset, packing_interval=8)))

    rows = list(itertools.islice(dataset, 3 * once))

    assert len(rows) == 3 * once
