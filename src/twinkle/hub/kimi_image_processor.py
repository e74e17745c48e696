"""Pictures as Kimi-K2.5's vision tower wants them, prepared with Pillow: transformers' own way needs torchvision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import PIL.Image

from twinkle.core.pictures import shrunk

PUBLISHED = "media_proc_cfg"
"""Holds the settings in the file that was published, which was written for code of its own."""
NAME_PREFIX = "Kimi"

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class KimiImageProcessor:
    """Makes a picture smaller, fills it up with black to whole tokens, and cuts it into patches [P, 3, side, side].

    As ``Kimi_K25ImageProcessor`` of transformers; the bounds are numbers of patches.
    """

    patch_size: int = 14
    merge_size: int = 2
    max_patches: int = 16384
    max_side_patches: int = 512
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @staticmethod
    def is_meant_by(settings: Mapping[str, Any]) -> bool:
        """Whether a ``preprocessor_config.json`` is for such a processor, as published or as transformers writes it."""
        return PUBLISHED in settings or str(settings.get("image_processor_type")).startswith(NAME_PREFIX)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """The processor of either form of that file; what one leaves out is as in Kimi-K2.5."""
        published = settings.get(PUBLISHED)
        if published is None:
            found = {**settings, "max_side_patches": (settings.get("size") or {}).get("max_height")}
        else:
            found = {
                **published,
                "merge_size": published.get("merge_kernel_size"),
                "max_patches": published.get("in_patch_limit"),
                "max_side_patches": published.get("patch_limit_on_one_side"),
            }
        defaults = asdict(cls())
        return cls(**{name: default if found.get(name) is None else found[name] for name, default in defaults.items()})

    def __call__(self, images: Sequence[PIL.Image.Image], *, return_tensors: str = "np") -> dict[str, Array]:
        """Patches of all pictures, one after the other, and the grid of each."""
        made = [self._patches(image) for image in images]
        return {
            "pixel_values": np.concatenate([patches for patches, _ in made]),
            "image_grid_thw": np.array([grid for _, grid in made], dtype=np.int64),
        }

    def _patches(self, image: PIL.Image.Image) -> tuple[Array, tuple[int, int, int]]:
        width, height = shrunk(*image.size, self.patch_size, self.max_patches, self.max_side_patches)
        plain = image.convert("RGB")
        if plain.size != (width, height):
            plain = plain.resize((width, height), PIL.Image.Resampling.BICUBIC)
        token = self.patch_size * self.merge_size
        pixels = np.pad(np.asarray(plain), ((0, -height % token), (0, -width % token), (0, 0)))
        mean, std = (np.array(values, dtype=np.float32) for values in (self.image_mean, self.image_std))
        scaled = (pixels.astype(np.float32) / 255 - mean) / std
        rows, columns = (length // self.patch_size for length in scaled.shape[:2])
        cut = scaled.reshape(rows, self.patch_size, columns, self.patch_size, 3).transpose(0, 2, 4, 1, 3)
        return cut.reshape(rows * columns, 3, self.patch_size, self.patch_size), (1, rows, columns)
