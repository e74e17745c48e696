"""The image processor that lies beside a model, in its form that needs Pillow alone, and how it counts tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twinkle.core.events import event_log
from twinkle.core.pictures import PictureRules

PROCESSOR_FILE = "preprocessor_config.json"

_log = event_log()


def load_image_processor(model: str) -> Any:
    """The processor of a model's folder or hub id; None if it has none, and then only text can be served.

    All models whose pictures are taken have Qwen2-VL's; its other form needs torchvision.
    """
    is_local = Path(model).exists()
    if not is_local or (Path(model) / PROCESSOR_FILE).exists():
        # It imports Pillow, which nobody needs who serves text alone.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (  # noqa: PLC0415
            Qwen2VLImageProcessorPil,
        )

        try:
            return Qwen2VLImageProcessorPil.from_pretrained(model, local_files_only=is_local)
        except OSError as error:
            reason = str(error).partition("\n")[0]
    else:
        reason = f"there is no {PROCESSOR_FILE}"
    _log.warning("model.pictures.not_served", model=model, reason=reason, next="it is served for text alone")
    return None


def picture_rules(config: Any, processor: Any) -> PictureRules:
    """How a model of this config counts the tokens of a picture that this processor prepares."""
    return PictureRules(
        token_id=config.image_token_id,
        other_token_ids=(config.video_token_id,),
        patch_size=processor.patch_size,
        merge_size=processor.merge_size,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
    )
