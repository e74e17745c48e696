"""Data by quality: rows that teach nothing good leave, each with a reason; the rules need no model.

base      what a quality filter is
rules     what a conversation must be, and must not do
texts     what its texts must be made of, and what is mended in them
pipeline  all of it in a row
judges    what a model or a list of words decides
scores    how hard a turn is for a model, by its own logprobs and answers
"""

from twinkle_agentic.preprocessor.base import QualityFilter
from twinkle_agentic.preprocessor.judges import IntentClassifier, JudgeFilter, ModelFilter
from twinkle_agentic.preprocessor.pipeline import QualityPreprocessor
from twinkle_agentic.preprocessor.rules import (
    DeadLoopFilter,
    DedupFilter,
    HardFilter,
    MessageSanityFilter,
    RefuseFilter,
    TokenNumFilter,
)
from twinkle_agentic.preprocessor.scores import (
    ChrMinScorer,
    IFDScorer,
    ParaphraseScorer,
    PassNScorer,
    ScoreFilter,
    Scorer,
)
from twinkle_agentic.preprocessor.texts import (
    FixUnicodeFilter,
    MessageNormalizer,
    RemoveRepeatSentencesFilter,
    SpecialCharsFilter,
    TokenSoupFilter,
)

__all__ = [
    "ChrMinScorer",
    "DeadLoopFilter",
    "DedupFilter",
    "FixUnicodeFilter",
    "HardFilter",
    "IFDScorer",
    "IntentClassifier",
    "JudgeFilter",
    "MessageNormalizer",
    "MessageSanityFilter",
    "ModelFilter",
    "ParaphraseScorer",
    "PassNScorer",
    "QualityFilter",
    "QualityPreprocessor",
    "RefuseFilter",
    "RemoveRepeatSentencesFilter",
    "ScoreFilter",
    "Scorer",
    "SpecialCharsFilter",
    "TokenNumFilter",
    "TokenSoupFilter",
]
