"""Data by quality: rows that teach nothing good leave, each with a reason; the rules need no model.

base      what a quality filter is
rules     what a conversation must be, and must not do
texts     what its texts must be made of, and what is mended in them
pipeline  all of it in a row
judges    what a model or a list of words decides
"""

from twinkle_agentic.preprocessor.base import QualityFilter
from twinkle_agentic.preprocessor.judges import IntentClassifier, ModelFilter
from twinkle_agentic.preprocessor.pipeline import QualityPreprocessor
from twinkle_agentic.preprocessor.rules import (
    DeadLoopFilter,
    DedupFilter,
    HardFilter,
    MessageSanityFilter,
    RefuseFilter,
    TokenNumFilter,
)
from twinkle_agentic.preprocessor.texts import (
    FixUnicodeFilter,
    MessageNormalizer,
    RemoveRepeatSentencesFilter,
    SpecialCharsFilter,
    TokenSoupFilter,
)

__all__ = [
    "DeadLoopFilter",
    "DedupFilter",
    "FixUnicodeFilter",
    "HardFilter",
    "IntentClassifier",
    "MessageNormalizer",
    "MessageSanityFilter",
    "ModelFilter",
    "QualityFilter",
    "QualityPreprocessor",
    "RefuseFilter",
    "RemoveRepeatSentencesFilter",
    "SpecialCharsFilter",
    "TokenNumFilter",
    "TokenSoupFilter",
]
