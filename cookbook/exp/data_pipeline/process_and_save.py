"""Refines conversations before anybody trains on them: mends texts, drops what teaches nothing good, and says why.

    DATASET_ID=chats.jsonl python cookbook/exp/data_pipeline/process_and_save.py
    DATASET_ID=chats.jsonl SCORE_MODEL_ID=ms://Qwen/Qwen3-0.6B python cookbook/exp/data_pipeline/process_and_save.py

Rows have ``messages``. What stays is in OUTPUT, what left in DROPPED with the filter and its reason. With a model to
score, turns that it finds too easy, or no language at all, leave as well. Needs ``twinkle-queue[scripts,refine]``.
"""

import os

from twinkle import get_logger
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.sampler import TorchSampler
from twinkle_agentic.preprocessor import (
    CharRepeatFilter,
    DeadLoopFilter,
    FixUnicodeFilter,
    HardFilter,
    IFDFilter,
    LanguageFilter,
    MessageNormalizer,
    MessageSanityFilter,
    MinHashDedupFilter,
    PerplexityFilter,
    QualityPreprocessor,
    RefuseFilter,
    ToolCallNormalizer,
    WordRepeatFilter,
)

DATASET_ID = os.environ.get("DATASET_ID", "chats.jsonl")
OUTPUT = os.environ.get("OUTPUT", "output/refined.jsonl")
DROPPED = os.environ.get("DROPPED", "output/dropped.jsonl")
LANGUAGES = os.environ.get("LANGUAGES", "en,zh").split(",")
SIMILARITY = float(os.environ.get("SIMILARITY", "0.7"))
SCORE_MODEL_ID = os.environ.get("SCORE_MODEL_ID", "")
MAX_PERPLEXITY = float(os.environ.get("MAX_PERPLEXITY", "1000"))
MIN_IFD = float(os.environ.get("MIN_IFD", "0.3"))

logger = get_logger()


def stages() -> list:
    """What rules tell, the cheap ones first; then what a model makes of the rows that are left."""
    rules = [
        MessageNormalizer(),
        ToolCallNormalizer(),
        FixUnicodeFilter(),
        MessageSanityFilter(),
        HardFilter(),
        RefuseFilter(),
        DeadLoopFilter(),
        WordRepeatFilter(),
        CharRepeatFilter(),
        LanguageFilter(LANGUAGES, min_score=0.5),
        MinHashDedupFilter(jaccard_threshold=SIMILARITY),
    ]
    if not SCORE_MODEL_ID:
        return rules
    sampler = TorchSampler(SCORE_MODEL_ID)
    sampler.set_template("Template", model_id=SCORE_MODEL_ID)
    return [*rules, PerplexityFilter(sampler, ppl_max=MAX_PERPLEXITY), IFDFilter(sampler, ifd_threshold=MIN_IFD)]


def refine() -> None:
    """Map the pipeline over all rows, save what stays, and say what left."""
    dataset = Dataset(DatasetMeta(DATASET_ID))
    before = len(dataset)
    pipeline = QualityPreprocessor(stages(), dropped_log_path=DROPPED)
    dataset.map(pipeline)
    dataset.save_as(OUTPUT)
    logger.info(f"{len(dataset)} of {before} rows stay, in {OUTPUT}")
    logger.info(pipeline.report())


if __name__ == "__main__":
    refine()
