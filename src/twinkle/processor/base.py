"""Where scripts import it from."""

from twinkle.processor.input_processor import InputProcessor

__all__ = ["InputProcessor"]
