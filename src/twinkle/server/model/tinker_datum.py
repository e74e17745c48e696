"""The name under which newer scripts import :mod:`twinkle.server.common`."""

from twinkle.server.common import input_feature_to_datum

__all__ = ["input_feature_to_datum"]
