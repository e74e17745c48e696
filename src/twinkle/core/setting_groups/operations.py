"""What one operation may be, and how long it and its result last."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from twinkle.core.operation import OperationKind
from twinkle.core.operation_limits import OperationLimits
from twinkle.core.pictures import PictureLimits
from twinkle.core.setting_groups import SettingsGroup


class OperationSettings(SettingsGroup):
    """What one operation may be, and how long it and its result last."""

    max_picture_bytes: int = Field(default=8 * 2**20, gt=0, description="one picture's file; more is an error")
    max_picture_pixels: int = Field(
        default=2**24, gt=0, description="width times height of one picture, before it is decoded; more is an error"
    )
    max_pictures: int = Field(default=32, gt=0, description="pictures in one datum or prompt; more is an error")
    max_operation_tokens: int = Field(
        default=2**20, gt=0, description="tokens of one forward or forward_backward; more is an error"
    )
    max_sample_tokens: int = Field(
        default=2**20, gt=0, description="tokens of one sample, its prompt and all its sequences; more is an error"
    )
    max_result_bytes: int = Field(
        default=64 * 2**20,
        gt=0,
        description="what one sample may come to: 8 bytes a token and alternative, 4 a score of the prompt",
    )
    max_stop_bytes: int = Field(default=64 * 2**10, gt=0, description="stop texts of one sample; more is an error")
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
    def operation_limits(self) -> OperationLimits:
        """How large an operation may be."""
        return OperationLimits(
            max_operation_tokens=self.max_operation_tokens,
            max_sample_tokens=self.max_sample_tokens,
            max_result_bytes=self.max_result_bytes,
            max_stop_bytes=self.max_stop_bytes,
        )

    @property
    def picture_limits(self) -> PictureLimits:
        """What pictures a client may send."""
        return PictureLimits(
            max_bytes=self.max_picture_bytes, max_pixels=self.max_picture_pixels, max_pictures=self.max_pictures
        )
