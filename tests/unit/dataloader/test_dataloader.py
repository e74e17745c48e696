"""Batches come by rank, wrong rows are replaced and counted, and a run goes on at the very next row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from harness.rows import conversation, write_jsonl
from twinkle.core.errors import InvalidInput
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, LazyDataset
from twinkle.infra import DeviceMesh, progress
from twinkle.processor import InputProcessor, ModelBatch
from twinkle.template import Template


def flat(batches: Any) -> list[Any]:
    return [row for batch in batches for row in batch]


def of_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


class Broken:
    """Rows that raise, are None, or are their number."""

    def __init__(self, size: int, wrong: dict[int, Exception | None]) -> None:
        self.size = size
        self.wrong = wrong

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int | None:
        if index in self.wrong:
            error = self.wrong[index]
            if error is None:
                return None
            raise error
        return index


class TestProgress:
    def test_where_a_loop_stands_is_told_now_and_then_with_rate_and_time_left(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
        with capture_logs() as said:
            for _ in DataLoader(list(range(8)), batch_size=4):
                pass
            for _ in DataLoader(list(range(8)), batch_size=4, phase=None):
                pass

        told = [line for line in said if line["event"] == "progress"]
        assert [(line["phase"], line["done"], line["total"], line["unit"]) for line in told] == [
            ("train", 1, 2, "batches"),
            ("train", 2, 2, "batches"),
        ]
        assert "left_s" in told[0]

    def test_a_loop_that_is_left_early_leaves_nothing_open(self) -> None:
        for _ in DataLoader(list(range(8)), batch_size=4):
            break


class TestBatches:
    def test_a_batch_is_a_list_of_rows(self) -> None:
        assert list(DataLoader(list(range(5)), batch_size=2)) == [[0, 1], [2, 3], [4]]

    def test_a_function_makes_the_data_set(self) -> None:
        loader = DataLoader(lambda: Dataset(DatasetMeta(data=[{"n": n} for n in range(3)])), batch_size=3)

        assert list(loader) == [[{"n": 0}, {"n": 1}, {"n": 2}]]

    @pytest.mark.parametrize(
        ("rows", "size", "least", "world"),
        [(6, 4, None, 1), (6, 4, 4, 1), (7, 4, 3, 1), (9, 4, None, 2), (0, 4, None, 1)],
    )
    def test_the_length_is_the_number_of_batches_that_come(
        self, monkeypatch: pytest.MonkeyPatch, rows: int, size: int, least: int | None, world: int
    ) -> None:
        of_rank(monkeypatch, 0, world)
        mesh = DeviceMesh.from_sizes(dp_size=world)

        loader = DataLoader(list(range(rows)), batch_size=size, min_batch_size=least, device_mesh=mesh)

        assert len(list(loader)) == len(loader)

    def test_a_small_last_batch_is_dropped(self) -> None:
        assert list(DataLoader(list(range(6)), batch_size=4, min_batch_size=4)) == [[0, 1, 2, 3]]
        assert list(DataLoader(list(range(6)), batch_size=4, drop_last=True)) == [[0, 1, 2, 3]]

    def test_each_rank_gets_its_part_of_a_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mesh = DeviceMesh.from_sizes(dp_size=2, fsdp_size=2)
        parts = []
        for rank in range(4):
            of_rank(monkeypatch, rank, 4)
            parts.append(list(DataLoader(list(range(22)), batch_size=8, device_mesh=mesh, shuffle=True, seed=3)))

        batches = [flat(part[index] for part in parts) for index in range(3)]
        assert [[len(part[index]) for part in parts] for index in range(3)] == [[2] * 4, [2] * 4, [1, 2, 1, 2]]
        of_rank(monkeypatch, 0, 1)
        assert batches == list(DataLoader(list(range(22)), batch_size=8, shuffle=True, seed=3))

    def test_without_a_mesh_all_ranks_share_a_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = []
        for rank in range(2):
            of_rank(monkeypatch, rank, 2)
            parts.append(list(DataLoader(list(range(8)), batch_size=4)))

        assert parts == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]

    def test_a_batch_smaller_than_the_ranks_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="each needs at least one row"):
            DataLoader([1], batch_size=1, device_mesh=DeviceMesh.from_sizes(dp_size=2))

    @pytest.mark.parametrize("batch_size", ["4", 4.0, None, 0, -1])
    def test_a_batch_size_that_is_no_number_of_rows_is_refused(self, batch_size: Any) -> None:
        with pytest.raises(InvalidInput, match=r"^batch_size: is .*; send "):
            DataLoader([1], batch_size=batch_size)

    def test_what_holds_no_rows_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="dataset: is None; pass a data set"):
            DataLoader(None, batch_size=1)

    @pytest.mark.parametrize("place", ["6", 2.5, None, -1, {"step": 3}])
    def test_a_place_to_go_on_from_that_is_none_is_refused_and_the_loader_stands_where_it_stood(
        self, place: Any
    ) -> None:
        loader = DataLoader([1, 2, 3], batch_size=1)
        loader.resume_from_checkpoint(1)

        for going_on in (loader.resume_from_checkpoint, loader.skip_consumed_samples):
            with pytest.raises(InvalidInput, match=r"^consumed_train_samples: is "):
                going_on(place)

        assert flat(list(loader)) == [2, 3]

    def test_what_would_break_the_order_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="the loader keeps the order"):
            DataLoader([1], batch_size=1, sampler=[0])

    def test_a_processor_makes_the_batch(self, template: Template) -> None:
        dataset = Dataset(DatasetMeta(data=[conversation(n) for n in range(4)]))
        dataset.set_template(template)
        dataset.encode()
        loader = DataLoader(dataset, batch_size=2)

        loader.set_processor(InputProcessor, padding_side="left")

        batch = next(iter(loader))
        assert isinstance(batch, ModelBatch) and batch.pads_left and batch.labels is not None
        assert len(batch.labels) == 2

    def test_a_function_makes_the_batch(self) -> None:
        loader = DataLoader([1, 2, 3, 4], batch_size=2)
        loader.set_processor(sum)

        assert list(loader) == [3, 7]

    def test_the_random_numbers_of_the_script_stay_its_own(self) -> None:
        torch.manual_seed(1)
        expected = torch.rand(3)

        torch.manual_seed(1)
        list(DataLoader(list(range(9)), batch_size=2, shuffle=True))

        assert torch.equal(torch.rand(3), expected)


class TestWrongRows:
    def test_a_row_that_raises_or_is_none_is_replaced_and_named(self) -> None:
        rows = Broken(10, {2: ValueError("too hot"), 5: None})

        loader = DataLoader(rows, batch_size=5)
        batches = list(loader)

        assert [len(batch) for batch in batches] == [5, 5]
        assert not {2, 5} & set(flat(batches))
        # A row that is tried in another's place is counted as well if it is wrong.
        assert loader.skipped.count == sum(loader.skipped.reasons.values()) >= 2
        assert set(loader.skipped.reasons) == {"ValueError: too hot", "is None"}
        assert sorted(row.name for row in loader.skipped.rows) == ["row 2", "row 5"]
        before = loader.skipped.count
        list(loader)
        assert loader.skipped.count > before
        assert sorted(row.name for row in loader.skipped.rows) == ["row 2", "row 5"]

    def test_a_row_of_a_file_is_named_by_its_line(self, tmp_path: Path, template: Template) -> None:
        path = write_jsonl(tmp_path / "rows.jsonl", [conversation(1), "", {"messages": []}, conversation(2)])
        dataset = LazyDataset(DatasetMeta(str(path)))
        dataset.set_template(template)
        dataset.encode()

        loader = DataLoader(dataset, batch_size=3)
        batch = next(iter(loader))

        assert len(batch) == 3
        assert loader.skipped.rows[0].name == f"{path}:3"
        assert loader.skipped.rows[0].reason.startswith("messages: ")

    def test_a_data_set_without_good_rows_ends_the_loop_with_their_names(self) -> None:
        rows = Broken(3, {index: ValueError("bad") for index in range(3)})

        with pytest.raises(InvalidInput, match=r"none of 5 rows .* row 0: ValueError: bad"):
            list(DataLoader(rows, batch_size=1, max_retries=4))

    def test_the_same_row_takes_its_place_when_a_run_is_taken_up_again(self) -> None:
        rows = Broken(20, {7: ValueError("bad"), 13: ValueError("bad")})
        whole = list(DataLoader(rows, batch_size=4, shuffle=True, seed=1))

        again = DataLoader(rows, batch_size=4, shuffle=True, seed=1, num_workers=2)
        again.resume_from_checkpoint(8)

        assert list(again) == whole[2:]

    def test_wrong_rows_are_counted_across_processes(self) -> None:
        loader = DataLoader(Broken(8, {1: ValueError("bad"), 6: None}), batch_size=2, num_workers=2)

        assert len(flat(loader)) == 8
        assert loader.skipped.count >= 2

    def test_wrong_rows_of_a_stream_are_skipped_and_named(self, tmp_path: Path, template: Template) -> None:
        path = write_jsonl(tmp_path / "rows.jsonl", [conversation(1), {"messages": []}, conversation(2)])
        dataset = IterableDataset(DatasetMeta(str(path)))
        dataset.set_template(template)
        dataset.encode()

        loader = DataLoader(dataset, batch_size=2)

        assert [len(batch) for batch in loader] == [2]
        assert [row.name for row in loader.skipped.rows] == [f"{path}:2"]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
class TestGoingOn:
    def loader(self, shuffle: bool, num_workers: int, **settings: Any) -> DataLoader:
        given = {"batch_size": 4, "shuffle": shuffle, "num_workers": num_workers, "seed": 5, **settings}
        return DataLoader(list(range(22)), **given)

    def test_a_run_goes_on_at_the_next_row_in_the_middle_of_any_pass(self, shuffle: bool, num_workers: int) -> None:
        first = self.loader(shuffle, num_workers)
        seen, states = [], []
        for _ in range(2):
            for batch in first:
                seen.append(batch)
                states.append(first.get_state())
        assert sorted(flat(seen[:6])) == sorted(flat(seen[6:])) == list(range(22))

        for stopped in (2, 8):
            again = self.loader(shuffle, num_workers)
            again.resume_from_checkpoint(states[stopped]["consumed_train_samples"])
            left_of_pass = 6 - (stopped + 1) % 6
            assert list(again) == seen[stopped + 1 : stopped + 1 + left_of_pass]
        if shuffle:
            assert seen[:6] != seen[6:]

    def test_the_state_counts_what_was_handed_out_and_not_what_was_read_ahead(
        self, shuffle: bool, num_workers: int
    ) -> None:
        loader = self.loader(shuffle, num_workers)

        told = [loader.get_state()["consumed_train_samples"] for _ in loader]

        assert told == [4, 8, 12, 16, 20, 22]

    def test_nothing_is_left_of_a_pass_that_had_ended(self, shuffle: bool, num_workers: int) -> None:
        loader = self.loader(shuffle, num_workers)
        loader.resume_from_checkpoint({"consumed_train_samples": 22})

        assert list(loader) == []
        assert sorted(flat(loader)) == list(range(22))

    def test_another_batch_size_and_other_ranks_go_on_at_the_same_row(
        self, shuffle: bool, num_workers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        order = flat(self.loader(shuffle, num_workers))
        parts = []
        for rank in range(2):
            of_rank(monkeypatch, rank, 2)
            loader = self.loader(shuffle, num_workers, batch_size=6, device_mesh=DeviceMesh.from_sizes(dp_size=2))
            loader.skip_consumed_samples(8)
            parts.append(list(loader))

        assert flat(flat(both) for both in zip(*parts, strict=True)) == order[8:]

    def test_a_pass_that_was_left_early_is_over(self, shuffle: bool, num_workers: int) -> None:
        loader = self.loader(shuffle, num_workers)
        next(iter(loader))

        second = list(loader)

        assert sorted(flat(second)) == list(range(22))
        again = self.loader(shuffle, num_workers)
        again.resume_from_checkpoint(22 + 4)
        assert list(again) == second[1:]


class TestStreams:
    def loader(self, **settings: Any) -> DataLoader:
        dataset = IterableDataset(DatasetMeta(data=[{"n": n} for n in range(10)]))
        return DataLoader(dataset, **{"batch_size": 4, **settings})

    def numbers(self, batches: Any) -> list[list[int]]:
        return [[row["n"] for row in batch] for batch in batches]

    def test_a_stream_comes_in_batches(self) -> None:
        assert self.numbers(self.loader()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        with pytest.raises(TypeError, match="no length"):
            len(self.loader())
        with pytest.raises(InvalidInput, match="shuffle its data set"):
            self.loader(shuffle=True)

    def test_ranks_share_a_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = []
        for rank in range(2):
            of_rank(monkeypatch, rank, 2)
            parts.append(self.numbers(self.loader(device_mesh=DeviceMesh.from_sizes(dp_size=2))))

        assert parts == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]

    @pytest.mark.parametrize("consumed", [4, 8, 10, 14, 24])
    def test_a_stream_goes_on_behind_what_was_consumed_in_any_pass(self, consumed: int) -> None:
        loader = self.loader()
        loader.resume_from_checkpoint(consumed)
        offset = consumed % 10 or 10

        assert flat(self.numbers(loader)) == list(range(offset, 10))
        assert loader.get_state() == {"consumed_train_samples": consumed + 10 - offset}
        assert flat(self.numbers(loader)) == list(range(10))

    def test_a_pass_of_a_stream_that_was_left_early_begins_anew(self) -> None:
        loader = self.loader()
        next(iter(loader))

        assert flat(self.numbers(loader)) == list(range(10))
        assert loader.get_state() == {"consumed_train_samples": 10}


def test_rows_are_saved_as_the_loop_takes_them(tmp_path: Path) -> None:
    dataset = Dataset(DatasetMeta(data=[{"n": n} for n in range(6)]))
    dataset.save_as(str(tmp_path / "rows.jsonl"), mode="training")

    loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=1)
    taken = flat(batch for batch, _ in zip(loader, range(2), strict=False))
    dataset.flush_save()

    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()][:4] == taken
