"""From the rows of data sets to trajectories, and which rows stay."""

from __future__ import annotations

from twinkle.preprocessor.base import DataFilter, Filter, Preprocessor
from twinkle.preprocessor.dpo import EmojiDPOProcessor
from twinkle.preprocessor.llm import (
    AlpacaProcessor,
    CompetitionMathGRPOProcessor,
    CompetitionMathProcessor,
    CountdownProcessor,
    GSM8KProcessor,
    SelfCognitionProcessor,
)
from twinkle.preprocessor.mm import CLEVRProcessor
from twinkle.preprocessor.olympiad_bench import OlympiadBenchProcessor

__all__ = [
    "PREPROCESSORS",
    "AlpacaProcessor",
    "CLEVRProcessor",
    "CompetitionMathGRPOProcessor",
    "CompetitionMathProcessor",
    "CountdownProcessor",
    "DataFilter",
    "EmojiDPOProcessor",
    "Filter",
    "GSM8KProcessor",
    "OlympiadBenchProcessor",
    "Preprocessor",
    "SelfCognitionProcessor",
]

PREPROCESSORS: dict[str, type[Preprocessor]] = {
    kind.__name__: kind
    for kind in (
        AlpacaProcessor,
        CLEVRProcessor,
        CompetitionMathGRPOProcessor,
        CompetitionMathProcessor,
        CountdownProcessor,
        EmojiDPOProcessor,
        GSM8KProcessor,
        OlympiadBenchProcessor,
        SelfCognitionProcessor,
    )
}
