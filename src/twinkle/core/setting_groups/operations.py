"""What one operation may be, and how long it and its result last."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from twinkle.core.operation import OperationKind
from twinkle.core.pictures import PictureLimits
from twinkle.core.setting_groups.group import SettingsGroup


class OperationSettings(SettingsGroup):
    """What one operation may be, and how long it and its result last."""

    max_picture_bytes: int = Field(default=8 * 2**20, gt=0, description="one picture's file; more is an error")
    max_picture_pixels: int = Field(
        default=2**24, gt=0, description="width times height of one picture, before it is decoded; more is an error"
    )
    max_pictures: int = Field(default=32, gt=0, description="pictures in one datum or prompt; more is an error")
    inline_payload_bytes: int = Field(default=64 * 2**10, gt=0, description="larger payloads and results become blobs")
    gap_timeout_s: float = Field(default=120.0, gt=0, description="how long operations wait for a missing number")
    max_attempts: int = Field(default=3, gt=0)
    result_ttl_s: float = Field(default=24 * 3600.0, gt=0)
    operation_deadline_s: float = Field(
        default=24 * 3600.0, gt=0, description="an operation not finished by then fails"
    )
    operation_deadline_s_of: dict[OperationKind, PositiveFloat] = Field(
        default={}, description='kinds with a deadline of their own, like {"sample": 600}'
    )

    @property
    def picture_limits(self) -> PictureLimits:
        """What pictures a client may send."""
        return PictureLimits(
            max_bytes=self.max_picture_bytes, max_pixels=self.max_picture_pixels, max_pictures=self.max_pictures
        )
