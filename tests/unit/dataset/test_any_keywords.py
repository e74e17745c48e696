"""Calls that the documents let take any keyword take it, and the log names it; all others refuse."""

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from twinkle.core.errors import InvalidInput
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.processor import InputProcessor
from twinkle.template import Template

ROWS = [{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}]


@pytest.fixture
def data() -> Dataset:
    return Dataset(DatasetMeta(data=ROWS))


def unknown(call: Callable[[], object]) -> list[tuple[object, object, object]]:
    with capture_logs() as logs:
        call()
    return [(line["call"], line["keyword"], line["next"]) for line in logs if line["event"] == "keyword.without_effect"]


def test_data_sets_name_what_they_do_not_know(data: Dataset, template: Template, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("a;b\n1;2\n")
    read = Dataset(DatasetMeta(str(file)), sep=";")
    data.set_template(template)

    assert read[0] == {"a": 1, "b": 2}
    assert unknown(lambda: Dataset(DatasetMeta(str(file)), delimitr=";")) == [
        ("Dataset", "delimitr", "did you mean delimiter?")
    ]
    assert unknown(lambda: Dataset(DatasetMeta(data=ROWS), features=None)) == [("Dataset", "features", "leave it out")]
    assert unknown(lambda: data.map(lambda columns: columns, num_procs=2)) == [
        ("map", "num_procs", "did you mean num_proc?")
    ]
    assert unknown(lambda: data.filter(lambda row: True, cache_file_name="x")) == [
        ("filter", "cache_file_name", "leave it out")
    ]
    assert unknown(lambda: data.check(batch_sizes=1)) == [("check", "batch_sizes", "did you mean batch_size?")]
    assert unknown(lambda: data.encode(suffix_template="_")) == [("encode", "suffix_template", "leave it out")]
    assert len(data) == 1


def test_what_would_change_the_rows_is_refused(data: Dataset) -> None:
    with pytest.raises(InvalidInput, match=r"with_indices: is not offered by map: .*init_args"):
        data.map(lambda columns, numbers: columns, with_indices=True)


def test_templates_loaders_and_processors_name_what_they_do_not_know(data: Dataset, template: Template) -> None:
    assert unknown(lambda: template.encode(ROWS[0], add_generation_prompts=True)) == [
        ("encode", "add_generation_prompts", "did you mean add_generation_prompt?")
    ]
    assert unknown(lambda: template.batch_encode(ROWS, padding=True)) == [("batch_encode", "padding", "leave it out")]
    assert unknown(lambda: DataLoader(data, batch_size=1, num_worker=0)) == [
        ("DataLoader", "num_worker", "did you mean num_workers?")
    ]
    assert unknown(lambda: InputProcessor(pading_free=True)) == [
        ("InputProcessor", "pading_free", "did you mean padding_free?")
    ]
    assert unknown(lambda: SamplingParams.from_dict({"top_q": 0.5, "max_new_tokens": 3})) == [
        ("SamplingParams.from_dict", "top_q", "did you mean top_p?")
    ]


def test_calls_with_fixed_arguments_refuse() -> None:
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=0.5)  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="did you mean top_p"):
        SamplingParams.from_exactly({"top_q": 0.5})
