"""How good a sampled answer is: trajectories in, a number for each out.

base            what a reward is, and what it reads of a trajectory
answers         where in a text the answer stands
format_reward   whether a text has the form that was asked for
gsm8k           grade-school problems: one number
math_reward     formulas that may be written in many ways, of text and of pictures
olympiad_bench  olympiads' problems, with partial credit
grading         whether two formulas are equal, judged in a process of its own (``grader_process``), within bounds
arithmetic      a number, wherever it stands at the answer's end
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.reward.arithmetic import ArithmeticReward
    from twinkle.reward.base import Reward
    from twinkle.reward.format_reward import FormatReward
    from twinkle.reward.gsm8k import GSM8KAccuracyReward, GSM8KFormatReward
    from twinkle.reward.math_reward import MathReward, MultiModalAccuracyReward
    from twinkle.reward.olympiad_bench import (
        OlympiadBenchAccuracyReward,
        OlympiadBenchFormatReward,
        OlympiadBenchQualityReward,
    )

__all__ = [
    "ArithmeticReward",
    "FormatReward",
    "GSM8KAccuracyReward",
    "GSM8KFormatReward",
    "MathReward",
    "MultiModalAccuracyReward",
    "OlympiadBenchAccuracyReward",
    "OlympiadBenchFormatReward",
    "OlympiadBenchQualityReward",
    "Reward",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "ArithmeticReward": "twinkle.reward.arithmetic",
        "FormatReward": "twinkle.reward.format_reward",
        "GSM8KAccuracyReward": "twinkle.reward.gsm8k",
        "GSM8KFormatReward": "twinkle.reward.gsm8k",
        "MathReward": "twinkle.reward.math_reward",
        "MultiModalAccuracyReward": "twinkle.reward.math_reward",
        "OlympiadBenchAccuracyReward": "twinkle.reward.olympiad_bench",
        "OlympiadBenchFormatReward": "twinkle.reward.olympiad_bench",
        "OlympiadBenchQualityReward": "twinkle.reward.olympiad_bench",
        "Reward": "twinkle.reward.base",
    },
)
