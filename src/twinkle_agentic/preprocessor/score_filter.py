"""Where scripts import it from."""

from twinkle_agentic.preprocessor.difficulty import SIFDScorer
from twinkle_agentic.preprocessor.scores import ChrMinScorer, ParaphraseScorer, PassNScorer, ScoreFilter, Scorer

__all__ = ["ChrMinScorer", "ParaphraseScorer", "PassNScorer", "SIFDScorer", "ScoreFilter", "Scorer"]
