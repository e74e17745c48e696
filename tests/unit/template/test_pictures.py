"""Pictures get their places among the tokens, and the model gets what it needs of them."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from harness.chat_templates import save_tokenizer
from harness.hub_models import save_hub_model
from harness.picture_files import picture_file
from harness.pictures import save_picture_model
from twinkle.core.errors import InvalidInput
from twinkle.dataset import Dataset, DatasetMeta, IterablePackingDataset, LazyDataset, PackingDataset
from twinkle.model import TransformersModel
from twinkle.processor import InputProcessor
from twinkle.template import Qwen3_5Template, RowError, Template
from twinkle.template.pictures import picture_preparer, put_in_place

PNG = picture_file(1, width=24, height=16)
ANSWER = {"role": "assistant", "content": "a cat"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hub_model(tmp_path_factory.mktemp("model") / "qwen3_5", "qwen3_5")


@pytest.fixture(scope="module")
def template(folder: Path) -> Template:
    return Qwen3_5Template(str(folder))


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def image_places(template: Template, row: dict[str, Any]) -> list[str]:
    """The text with one token for each picture, cut at these."""
    text = template.tokenizer.decode(template.get_vllm_input_ids(row))
    return text.split("<|image_pad|>")


def test_a_picture_has_its_tokens_its_grid_and_positions_as_the_model_itself_counts_them(
    folder: Path, template: Template
) -> None:
    row = template.encode({"messages": [user("<image>What is <image>?"), ANSWER], "images": [PNG, picture_file(2)]})

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    ids = torch.tensor(row["input_ids"])[None]
    kinds = torch.tensor(row["mm_token_type_ids"])[None]
    positions, _ = model.model.get_rope_index(ids, kinds, torch.tensor(row["image_grid_thw"]))
    assert row["position_ids"].tolist() == positions[:, 0].tolist()
    assert kinds.bool().tolist() == (ids == model.config.image_token_id).tolist()
    assert int(kinds.sum()) * 4 == len(row["pixel_values"]) == int(row["image_grid_thw"].prod(1).sum())
    assert template.decode(row["labels"]) == "a cat<|im_end|>"
    assert (
        row["labels"][:-1][row["labels"][:-1] >= 0].tolist() == row["input_ids"][1:][row["labels"][:-1] >= 0].tolist()
    )


@pytest.mark.parametrize(
    ("message", "images"),
    [
        (user("one<image>two<image>"), [PNG, PNG]),
        (user([{"type": "text", "text": "one"}, {"type": "image"}, "two", {"type": "image"}]), [PNG, PNG]),
        (user([{"type": "text", "text": "one<image>two"}, {"type": "image", "image": PNG}]), [PNG]),
        (user("one<image>two<image>", images=[PNG]), [PNG]),
    ],
)
def test_pictures_go_where_marks_and_parts_are(template: Template, message: dict[str, Any], images: list[Any]) -> None:
    row = template.encode({"messages": [message, ANSWER], "images": images})

    before, between, after = image_places(template, row)
    assert before.endswith("user\none<|vision_start|>")
    assert between == "<|vision_end|>two<|vision_start|>" and after.startswith("<|vision_end|><|im_end|>")


def test_pictures_without_a_place_stand_before_the_first_question(template: Template) -> None:
    messages = [{"role": "system", "content": "s"}, user("<image>one"), ANSWER, user("two")]

    row = template.encode({"messages": messages, "images": [PNG, picture_file(3, width=16)]})

    before, between, after = image_places(template, row)
    assert before.endswith("user\n<|vision_start|>") and between == "<|vision_end|><|vision_start|>"
    assert after.startswith("<|vision_end|>one")
    # The mark has the first picture, the other stands before it.
    assert (
        row["image_grid_thw"].tolist()[1]
        == template.encode({"messages": [user("<image>")], "images": [PNG]})["image_grid_thw"].tolist()[0]
    )


def test_pictures_come_as_files_bytes_arrays_urls_or_a_data_sets_objects(template: Template, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    picture = Image.open(io.BytesIO(PNG))
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    given: list[Any] = [
        PNG,
        picture,
        np.asarray(picture),
        url,
        str(tmp_path / "a.png"),
        f"file://{tmp_path}/a.png",
        {"bytes": PNG, "path": None},
        {"bytes": None, "path": str(tmp_path / "a.png")},
    ]

    rows = [template.encode({"messages": [user("<image>"), ANSWER], "images": [value]}) for value in given]
    part = {"type": "image_url", "image_url": {"url": url}}
    rows.append(template.encode({"messages": [user([part]), ANSWER]}))

    assert all(np.array_equal(row["pixel_values"], rows[0]["pixel_values"]) for row in rows)


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": [user("<image><image>")], "images": [PNG]},
        "images: are fewer than the .* message 0 has none",
    ),
    ({"messages": [user("<image>")], "images": [b"no"]}, r"images\[0\]: cannot be decoded"),
    ({"messages": [user("<image>")], "images": ["/nowhere.png"]}, r"images\[0\]: cannot be read: No such file"),
    ({"messages": [user("<image>")], "images": ["https://x/a.png"]}, r"images\[0\]: is an address, and nothing is"),
    ({"messages": [user("<image>")], "images": [7]}, r"images\[0\]: is a int"),
    ({"messages": [user("<image><|image_pad|>")], "images": [PNG]}, "images: are 1, but the text has 2 places"),
    ({"messages": [user("?")], "videos": ["a.mp4"]}, "videos: are not taken"),
    (
        {"messages": [user([{"type": "video", "video": "a"}])]},
        r"messages\[0\]\.content\[0\]: is of type 'video'; videos",
    ),
    ({"messages": [user("?", audios=["a.wav"]), ANSWER]}, r"messages\[0\]\.audios: are not taken, only images"),
]


@pytest.mark.parametrize(("row", "told"), WRONG)
def test_what_is_wrong_with_pictures_is_told(template: Template, row: dict[str, Any], told: str) -> None:
    with pytest.raises(RowError, match=told):
        template.encode(row)


def test_a_row_is_cut_between_its_pictures_and_never_through_one(folder: Path, template: Template) -> None:
    row = {
        "messages": [user("a<image>b"), ANSWER, user("c<image>d"), ANSWER],
        "images": [PNG, picture_file(2, width=32, height=48)],
    }
    whole = template.encode(row)
    patches = whole["image_grid_thw"].prod(axis=1)
    kinds = whole["mm_token_type_ids"]
    for strategy in ("left", "right"):
        for length in range(8, len(kinds)):
            cut = Qwen3_5Template(str(folder), max_length=length, truncation_strategy=strategy)  # type: ignore[arg-type]
            piece = cut.encode(row)
            size = piece["length"]
            assert 0 < size <= length
            start = 0 if strategy == "right" else len(kinds) - size
            assert piece["input_ids"].tolist() == whole["input_ids"][start : start + size].tolist()
            kept = piece.get("image_grid_thw", np.zeros((0, 3), dtype=int))
            number = slice(2 - len(kept), 2) if strategy == "left" else slice(0, len(kept))
            assert kept.tolist() == whole["image_grid_thw"][number].tolist()
            assert int(kinds[start : start + size].sum()) * 4 == int(patches[number].sum())
            if not len(kept):
                assert piece["position_ids"].ndim == 1 and "pixel_values" not in piece
                continue
            assert len(piece["pixel_values"]) == int(patches[number].sum())
            shifts = whole["position_ids"][:, start : start + size] - piece["position_ids"]
            assert piece["position_ids"].min() == 0 and len(set(shifts.ravel().tolist())) == 1
    deleting = Qwen3_5Template(str(folder), max_length=20, truncation_strategy="delete")
    assert deleting.batch_encode([row]) == []


def test_a_row_is_split_between_its_pictures_and_every_piece_holds_its_own(folder: Path, template: Template) -> None:
    row = {
        "messages": [user("a<image><image>b"), ANSWER, user("c<image>d"), ANSWER],
        "images": [PNG, picture_file(2, width=32, height=48), PNG],
    }
    whole = template.encode(row)
    starts = np.flatnonzero(np.diff(whole["mm_token_type_ids"], prepend=0) == 1)
    longest = 2 + int((whole["image_grid_thw"].prod(axis=1) // 4).max())
    with pytest.raises(RowError, match=r"images: hold one of .* max_length is .* raise max_length"):
        Qwen3_5Template(str(folder), max_length=longest - 1, truncation_strategy="split").batch_encode([row])

    for length in (longest, longest + 1, longest + 7, whole["length"] - 1, whole["length"]):
        pieces = Qwen3_5Template(str(folder), max_length=length, truncation_strategy="split").batch_encode([row])

        assert all(0 < piece["length"] <= length for piece in pieces) and len(pieces) >= whole["length"] / length
        for name in ("input_ids", "labels"):
            assert np.concatenate([piece[name] for piece in pieces]).tolist() == whole[name].tolist()
        with_pictures = [piece for piece in pieces if "pixel_values" in piece]
        for name in ("pixel_values", "image_grid_thw"):
            assert np.array_equal(np.concatenate([piece[name] for piece in with_pictures]), whole[name])
        first = 0
        for piece in pieces:
            end = first + piece["length"]
            number = int(((starts >= first) & (starts < end)).sum())
            assert len(piece.get("image_grid_thw", ())) == number
            assert piece["position_ids"].min() == 0 and piece["position_ids"].ndim == (2 if number else 1)
            first = end


@pytest.mark.parametrize("numbers", [(1, 1, 0, 0), (0, 0, 1, 2), (0, 0, 0)])
def test_batches_without_pictures_stand_in_a_data_set_beside_those_with_some(
    folder: Path, numbers: tuple[int, ...]
) -> None:
    rows = [
        {"messages": [user("<image>" * number + "What?"), ANSWER], "images": [picture_file(n) for n in range(number)]}
        for number in numbers
    ]
    template = Qwen3_5Template(str(folder), max_length=200)
    dataset = Dataset(DatasetMeta(data=rows))
    dataset.set_template(template)

    dataset.encode(batch_size=2)

    for row, sequence in zip(rows, InputProcessor().sequences(list(dataset)), strict=True):
        (expected,) = InputProcessor().sequences([template.encode(row)])
        assert torch.equal(sequence.input_ids, expected.input_ids) and torch.equal(sequence.labels, expected.labels)
        assert (sequence.pictures is None) == (expected.pictures is None)
        for name in ("pixel_values", "image_grid_thw"):
            assert (name in sequence.media) == bool(row["images"])
            assert not row["images"] or torch.equal(sequence.media[name], expected.media[name])
    assert ("pixel_values" in dataset[0]) == any(numbers)


@pytest.mark.parametrize("kind", [Dataset, LazyDataset])
@pytest.mark.parametrize("first", [1, 0])
def test_a_preprocessor_may_put_pictures_into_a_message(template: Template, kind: Any, first: int) -> None:
    """As Twinkle's own scripts for pictures do, with a picture as a data set of Hugging Face's hands it out."""

    def asked(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        pictures = [Image.open(io.BytesIO(picture_file(number))) for number in columns["number"]]
        return {
            "messages": [
                [{**user("<image>" * (number % 2) + "What?"), "images": [picture] * (number % 2)}, ANSWER]
                for number, picture in zip(columns["number"], pictures, strict=True)
            ]
        }

    dataset = kind(DatasetMeta(data=[{"number": number} for number in range(first, first + 4)]))
    dataset.set_template(template)
    dataset.map(asked)
    dataset.encode(**({} if kind is LazyDataset else {"batch_size": 1}))

    for row, number in zip((dataset[place] for place in range(4)), range(first, first + 4), strict=True):
        alone = {"messages": [user("<image>" * (number % 2) + "What?"), ANSWER]}
        expected = template.encode({**alone, "images": [picture_file(number)] * (number % 2)})
        (found,), (wanted,) = (InputProcessor().sequences([each]) for each in (row, expected))
        assert torch.equal(found.input_ids, wanted.input_ids) and torch.equal(found.labels, wanted.labels)
        assert (found.pictures is None) == (number % 2 == 0)
        if number % 2:
            assert torch.equal(found.media["pixel_values"], wanted.media["pixel_values"])


@pytest.mark.parametrize("kind", [Dataset, LazyDataset])
@pytest.mark.parametrize("numbers", [((1, 0), (0, 2), (0, 0)), ((0, 0), (1, 0)), ((0, 0), (0, 0))])
def test_pairs_hold_pictures_each_of_its_own_or_none(
    template: Template, kind: Any, numbers: tuple[tuple[int, int], ...]
) -> None:
    def side(number: int) -> dict[str, Any]:
        return {
            "messages": [user("<image>" * number + "What?"), ANSWER],
            "images": [picture_file(n) for n in range(number)],
        }

    pairs = [{"positive": side(one), "negative": side(other), "id": one} for one, other in numbers]
    dataset = kind(DatasetMeta(data=pairs))
    dataset.set_template(template)

    dataset.encode(**({} if kind is LazyDataset else {"batch_size": 1}))

    found = [dataset[index][name] for index in range(len(pairs)) for name in ("positive", "negative")]
    expected = InputProcessor()([template.encode(pair[name]) for pair in pairs for name in ("positive", "negative")])
    batch = InputProcessor()(found)
    assert batch.model_inputs.keys() == expected.model_inputs.keys()
    assert all(torch.equal(batch.model_inputs[name], values) for name, values in expected.model_inputs.items())
    assert batch.labels is not None and torch.equal(batch.labels, expected.labels)
    assert dataset[0]["id"] == numbers[0][0]


@pytest.mark.parametrize("kind", [PackingDataset, IterablePackingDataset])
def test_rows_with_pictures_are_packed_and_train_as_they_do_alone(folder: Path, kind: Any) -> None:
    rows = [
        {"messages": [user("<image>" * number + "What?"), ANSWER], "images": [picture_file(n) for n in range(number)]}
        for number in (1, 0, 2, 0, 1)
    ]
    template = Qwen3_5Template(str(folder), max_length=200)
    encoded = [template.encode(row) for row in rows]
    dataset = kind(DatasetMeta(data=rows))
    dataset.set_template(template)
    dataset.encode()
    dataset.pack_dataset()

    found = list(dataset) if kind is IterablePackingDataset else [dataset[index] for index in range(len(dataset))]

    assert len(found) < len(rows) and all(row["length"] <= 200 for row in found)
    processor = InputProcessor()
    ours = sorted(processor.sequences(found), key=lambda sequence: (len(sequence.input_ids), str(sequence.input_ids)))
    theirs = sorted(
        processor.sequences(encoded), key=lambda sequence: (len(sequence.input_ids), str(sequence.input_ids))
    )
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.labels, other.labels)
        positions = other.position_ids
        assert torch.equal(one.position_ids, positions if positions.dim() == one.position_ids.dim() else
                           positions.expand_as(one.position_ids))  # fmt: skip
        assert one.media.keys() - {"mm_token_type_ids"} == other.media.keys() - {"mm_token_type_ids"}
        for name, values in other.media.items():
            assert torch.equal(one.media[name], values)
        assert (one.pictures is None) == (other.pictures is None)
    with pytest.raises(InvalidInput, match="member_pictures"):
        processor({**found[0], "member_pictures": [9] * len(found[0]["member_lengths"])})
    with pytest.raises(InvalidInput, match="member_lengths"):
        processor({**found[0], "member_lengths": [1]})


def test_a_sampled_answer_goes_on_after_the_pictures_positions(template: Template) -> None:
    prompt = template.encode({"messages": [user("<image>What?")], "images": [PNG]}, add_generation_prompt=True)

    row = template.concat_input_feature(prompt, [5, 6])

    following = int(prompt["position_ids"].max()) + 1
    assert [axis[-2:] for axis in row["position_ids"]] == [[following, following + 1]] * 3
    assert row["mm_token_type_ids"][-2:] == [0, 0] and len(row["mm_token_type_ids"]) == row["length"]


def test_text_under_the_template_for_pictures_has_plain_positions_and_loads_nothing_for_them(tmp_path: Path) -> None:
    text_model = Qwen3_5Template(str(save_hub_model(tmp_path / "text", "qwen3")))
    alone = Qwen3_5Template(str(save_tokenizer(tmp_path / "tokenizer", "qwen3.5")))
    row = {"messages": [user([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]), ANSWER]}

    for template in (text_model, alone):
        encoded = template.encode(row)
        assert encoded["position_ids"].tolist() == list(range(encoded["length"]))
        assert "one two" in template.decode(encoded["input_ids"])
        assert "pictures" not in template.__dict__
    with pytest.raises(RowError, match=r"images: are in the row, but .* takes text alone"):
        text_model.encode({"messages": [user("<image>")], "images": [PNG]})
    assert text_model.encode({"messages": [user("an <image> tag"), ANSWER]})["length"] > 0


def test_a_conversation_with_a_picture_trains_by_the_templates_name(folder: Path) -> None:
    model = TransformersModel(model_id=str(folder), model_cls="AutoModelForImageTextToText", mixed_precision="no")
    model.set_template("Qwen3_5Template")
    model.set_optimizer("AdamW", lr=1e-2)
    rows = [{"messages": [user("<image>What?"), ANSWER], "images": [PNG]}, {"messages": [user("Who?"), ANSWER]}]

    losses = []
    for _ in range(4):
        losses.append(model.forward_backward(inputs=rows)["loss"])
        model.clip_grad_and_step()

    assert losses[-1] < losses[0] - 1


def test_a_template_loads_neither_data_sets_nor_hubs_nor_image_processors(tmp_path: Path) -> None:
    program = (
        "import sys, twinkle.template, twinkle.preprocessor\n"
        f"template = twinkle.template.Template({str(save_tokenizer(tmp_path))!r})\n"
        "template.encode({'messages': [{'role': 'user', 'content': '?'}]})\n"
        "names = ('datasets', 'modelscope', 'torchvision', 'image_processing_pil', 'image_processing_qwen')\n"
        "print([name for name in sys.modules if any(part in name for part in names) and 'dummy' not in name])\n"
    )

    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)

    assert found.stdout.splitlines()[-1] == "[]"


def test_pictures_of_kimi_have_positions_like_text(tmp_path: Path) -> None:
    preparer = picture_preparer(str(save_picture_model(tmp_path, "kimi-k2.5")))
    assert preparer is not None
    made = preparer.prepare([Image.open(io.BytesIO(PNG))])
    tokens = np.array([5, preparer.token_id, 6])

    filled, trains, media, positions = put_in_place(tokens, np.array([False, False, True]), preparer, made)

    assert positions is None
    assert filled.tolist() == [5, *[preparer.token_id] * 6, 6]
    assert trains.tolist() == [False] * 7 + [True]
    assert media["pixel_values"].shape == (24, 3, 4, 4)
    assert media["image_grid_thw"].tolist() == [[1, 4, 6]]


@pytest.mark.parametrize(
    ("prepare", "field"),
    [
        (lambda template: template.preprocess_video("a.mp4"), "videos"),
        (lambda template: template.preprocess_videos(["a.mp4"]), "videos"),
        (lambda template: template.preprocess_audio("a.wav"), "audios"),
        (lambda template: template.preprocess_audios(["a.wav"]), "audios"),
    ],
)
def test_films_and_sounds_are_refused_by_their_field(prepare, field):
    template = Template.__new__(Template)
    assert template.preprocess_videos([]) == template.preprocess_audios([]) == []
    with pytest.raises(RowError, match=f"{field}: are not taken") as refused:
        prepare(template)
    assert refused.value.field == field


def test_a_template_lets_what_goes_into_the_model_pass_as_it_is():
    assert Template.__new__(Template).pre_forward_hook(None, (1,), {"a": 2}) == ((1,), {"a": 2})
