"""Kimi's pictures, prepared with Pillow, are those of transformers' own code, which torchvision alone can import."""

import ast
import json
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from harness.pictures import image_processor, save_picture_model
from twinkle.core.pictures import shrunk
from twinkle.hub.image_processor import load_image_processor
from twinkle.hub.kimi_image_processor import KimiImageProcessor

SIZES = ((1, 1), (13, 4099), (37, 53), (224, 224), (768, 512), (3591, 3591), (4096, 4096), (8192, 256), (28672, 224))


@pytest.fixture(scope="module")
def theirs():
    """Two functions of their module, out of its text."""
    package = Path(find_spec("transformers").origin).parent
    source = (package / "models" / "kimi_k25" / "image_processing_kimi_k25.py").read_text()
    wanted = {"navit_resize", "patchify"}
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name in wanted]
    module = ast.Module(body=found, type_ignores=[])
    functions: dict[str, object] = {"math": math}
    exec(compile(module, "kimi", "exec"), functions)
    return functions


@pytest.mark.parametrize("bounds", [(16384, 512), (60, 12), (7, 3)], ids=str)
def test_a_picture_is_made_as_small_as_transformers_makes_it(theirs, bounds):
    max_patches, max_side = bounds
    processor = KimiImageProcessor(max_patches=max_patches, max_side_patches=max_side)
    for width, height in SIZES:
        (rows, columns), (filled_height, filled_width) = theirs["navit_resize"](
            height, width, 14, 2, max_patches, max_side
        )
        assert shrunk(width, height, 14, max_patches, max_side) == (columns, rows)
        if width * height < 10**6:
            (grid,) = processor(images=[Image.new("RGB", (width, height))])["image_grid_thw"].tolist()
            assert grid == [1, filled_height // 14, filled_width // 14]


def test_patches_are_cut_filled_up_and_scaled_as_transformers_does_it(theirs):
    processor = image_processor("kimi-k2.5")
    pixels = np.random.default_rng(1).integers(0, 256, (9, 13, 3), dtype=np.uint8)

    made = processor(images=[Image.fromarray(pixels), Image.fromarray(pixels[:5])])

    filled = torch.zeros(1, 3, 16, 16)
    filled[:, :, :9, :13] = torch.from_numpy(pixels).permute(2, 0, 1)
    expected, rows, columns = theirs["patchify"](None, (filled / 255 - 0.5) / 0.5, 4)
    assert made["image_grid_thw"].tolist() == [[1, rows, columns], [1, 2, 4]]
    np.testing.assert_allclose(made["pixel_values"][: rows * columns], expected[0].numpy(), atol=1e-6)
    assert len(made["pixel_values"]) == rows * columns + 8


def test_both_forms_of_its_settings_are_read(tmp_path):
    save = {"image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 4, "merge_size": 2, "max_patches": 60}
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({**save, "size": {"max_height": 12, "max_width": 12}})
    )
    published = tmp_path / "published"
    save_picture_model(published, "kimi-k2.5")

    assert load_image_processor(str(tmp_path)) == load_image_processor(str(published)) == image_processor("kimi-k2.5")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": {}}))
    assert load_image_processor(str(tmp_path)) == KimiImageProcessor()
