"""The image processor that lies beside a model, in a form that needs Pillow alone, and how it counts tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twinkle.core.pictures import PictureRules
from twinkle.core.process.events import event_log

PROCESSOR_FILE = "preprocessor_config.json"
KIMI = "kimi_k25"

_log = event_log()


def load_image_processor(model: str) -> Any:
    """The processor of a model's folder or hub id; None if it has none, and then only text can be served.

    Kimi's is our own, all others have Qwen2-VL's: the forms that transformers has besides need torchvision.
    """
    is_local = Path(model).exists()
    if not is_local or (Path(model) / PROCESSOR_FILE).exists():
        # They import Pillow, which nobody needs who serves text alone.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (  # noqa: PLC0415
            Qwen2VLImageProcessorPil,
        )

        from twinkle.hub.kimi_image_processor import KimiImageProcessor  # noqa: PLC0415

        try:
            settings, _ = Qwen2VLImageProcessorPil.get_image_processor_dict(model, local_files_only=is_local)
            if KimiImageProcessor.is_meant_by(settings):
                return KimiImageProcessor.from_settings(settings)
            return Qwen2VLImageProcessorPil.from_pretrained(model, local_files_only=is_local)
        except OSError as error:
            reason = str(error).partition("\n")[0]
    else:
        reason = f"there is no {PROCESSOR_FILE}"
    _log.warning("model.pictures.not_served", model=model, reason=reason, next="it is served for text alone")
    return None


def picture_rules(config: Any, processor: Any) -> PictureRules:
    """How a model of this config counts the tokens of a picture that this processor prepares."""
    # Kimi's for films lies beyond its vocabulary.
    is_known = config.video_token_id < config.get_text_config().vocab_size
    ids = {"token_id": config.image_token_id, "other_token_ids": (config.video_token_id,) if is_known else ()}
    sides = {"patch_size": processor.patch_size, "merge_size": processor.merge_size}
    if config.model_type == KIMI:
        return PictureRules(
            **ids,
            **sides,
            min_pixels=1,
            max_pixels=processor.max_patches * processor.patch_size**2,
            max_side_patches=processor.max_side_patches,
            one_axis=True,
        )
    size = processor.size
    return PictureRules(**ids, **sides, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])


def patch_shape(config: Any, processor: Any) -> tuple[int, ...]:
    """The shape in which a model's tower takes a patch."""
    side = processor.patch_size
    return (3, side, side) if config.model_type == KIMI else (3 * processor.temporal_patch_size * side**2,)
