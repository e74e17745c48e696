"""From rows to what a model takes."""

from twinkle.processor.input_processor import InputProcessor, ModelBatch

__all__ = ["InputProcessor", "ModelBatch"]
