"""Data by quality: rows that teach nothing good leave, each with a reason; the rules need no model.

base             what a quality filter is
rules            what a conversation must be, and must not do
loops            conversations that go in circles, or were there before
texts            what its texts must be made of, and what is mended in them
shares           repetitions, letters, flagged words: how much of a text is of a kind
near_duplicates  what says nearly what an earlier row says
language         which language a text is in
agent_traces     where tools are called, and how
pipeline         all of it in a row
judges           what a model or a list of words decides
scores           how hard a turn is for a model, by its own logprobs and answers
difficulty       rows by it
response_refiner turns that a stronger model says again
pii_presidio_filter  personal data (``pii_recognizers``: where it stands)
llm_backend      the models that all these ask
"""

from twinkle_agentic.preprocessor.agent_traces import AgentTraceFilter, ToolCallNormalizer
from twinkle_agentic.preprocessor.base import QualityFilter
from twinkle_agentic.preprocessor.difficulty import IFDFilter, PerplexityFilter, PerplexityScorer, SIFDScorer
from twinkle_agentic.preprocessor.judges import IntentClassifier, JudgeFilter, ModelFilter
from twinkle_agentic.preprocessor.language import LanguageFilter
from twinkle_agentic.preprocessor.llm_backend import LLMBackend, OpenAIBackend, SamplerBackend
from twinkle_agentic.preprocessor.loops import DeadLoopFilter, DedupFilter
from twinkle_agentic.preprocessor.near_duplicates import MinHashDedupFilter
from twinkle_agentic.preprocessor.pii_presidio_filter import PIIPresidioFilter
from twinkle_agentic.preprocessor.pipeline import QualityPreprocessor
from twinkle_agentic.preprocessor.response_refiner import ResponseRefiner
from twinkle_agentic.preprocessor.rules import HardFilter, MessageSanityFilter, RefuseFilter, TokenNumFilter
from twinkle_agentic.preprocessor.scores import (
    ChrMinScorer,
    IFDScorer,
    ParaphraseScorer,
    PassNScorer,
    ScoreFilter,
    Scorer,
)
from twinkle_agentic.preprocessor.shares import (
    AlphanumericFilter,
    CharRepeatFilter,
    FlaggedWordsFilter,
    WordRepeatFilter,
)
from twinkle_agentic.preprocessor.texts import (
    FixUnicodeFilter,
    MessageNormalizer,
    RemoveRepeatSentencesFilter,
    SpecialCharsFilter,
    TokenSoupFilter,
)

__all__ = [
    "AgentTraceFilter",
    "AlphanumericFilter",
    "CharRepeatFilter",
    "ChrMinScorer",
    "DeadLoopFilter",
    "DedupFilter",
    "FixUnicodeFilter",
    "FlaggedWordsFilter",
    "HardFilter",
    "IFDFilter",
    "IFDScorer",
    "IntentClassifier",
    "JudgeFilter",
    "LLMBackend",
    "LanguageFilter",
    "MessageNormalizer",
    "MessageSanityFilter",
    "MinHashDedupFilter",
    "ModelFilter",
    "OpenAIBackend",
    "PIIPresidioFilter",
    "ParaphraseScorer",
    "PassNScorer",
    "PerplexityFilter",
    "PerplexityScorer",
    "QualityFilter",
    "QualityPreprocessor",
    "RefuseFilter",
    "RemoveRepeatSentencesFilter",
    "ResponseRefiner",
    "SIFDScorer",
    "SamplerBackend",
    "ScoreFilter",
    "Scorer",
    "SpecialCharsFilter",
    "TokenNumFilter",
    "TokenSoupFilter",
    "ToolCallNormalizer",
    "WordRepeatFilter",
]
