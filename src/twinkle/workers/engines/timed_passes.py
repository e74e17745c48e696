"""The number of threads with which the served model is quickest, timed on passes of it."""

from __future__ import annotations

import time
from typing import Any

import structlog
import torch

from twinkle.infra.rank_group import RankGroup
from twinkle.model.loading import decoder_of
from twinkle.workers.engines.threads import kind_of_cpu, measure_threads, thread_limit, wait_for_cores

_FEWEST_TIMED_TOKENS = 8
_MOST_TIMED_TOKENS = 64
"""A short sequence's. With more a small model gains from threads where nothing else runs, and loses in service."""
_TIMED_PASS_S = 0.07

_log = structlog.get_logger()


class PassTimer:
    """Times a forward and backward pass of a plain model, on all ranks at once: the slowest counts."""

    def __init__(self, model: Any, ranks: RankGroup) -> None:
        model.eval().requires_grad_(False)
        self._decoder, self._embedding, self._ranks = decoder_of(model), model.get_input_embeddings(), ranks
        self._num_tokens = _FEWEST_TIMED_TOKENS

    def fit(self, threads: int) -> None:
        """Time passes of as many tokens as take a moment, and no more than a short sequence has.

        A pass of few tokens takes nearly as long, and shows less of what threads are worth with many tenants: so their
        number is doubled, not reckoned by what a token of a short pass takes.
        """
        self(threads)
        while self(threads) < _TIMED_PASS_S and self._num_tokens < _MOST_TIMED_TOKENS:
            self._num_tokens *= 2

    def __call__(self, threads: int) -> float:
        """The seconds of one pass with so many threads, which stay set."""
        torch.set_num_threads(threads)
        token_ids = torch.arange(self._num_tokens) % self._embedding.num_embeddings
        embeddings = self._embedding(token_ids)[None].requires_grad_()
        started = time.perf_counter()
        self._decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state.sum().backward()
        return max(self._ranks.gather(time.perf_counter() - started))


def choose_threads(model: Any, ranks: RankGroup) -> None:
    """Set the number of threads with which the model is quickest; on a GPU each rank has its share of the cores."""
    # All ranks go by the limit of the first: they must time the same numbers together.
    limit = ranks.gather(thread_limit(ranks.size))[0]
    if model.device.type != "cpu":
        torch.set_num_threads(min(limit, torch.get_num_threads()))
        return
    if limit == 1:
        torch.set_num_threads(1)
        return
    # The first looks for all: the others wait for what it says, and take no core meanwhile.
    was_quiet = ranks.gather(ranks.rank > 0 or wait_for_cores(limit * ranks.size))[0]
    time_pass = PassTimer(model, ranks)
    time_pass.fit(limit)
    times = measure_threads(time_pass, limit)
    torch.set_num_threads(times.threads)
    figures = ", ".join(f"{threads}: {1000 * seconds:.2f} ms" for threads, seconds in sorted(times.seconds.items()))
    _log.info("threads.measured", threads=times.threads, passes=figures, cpu=kind_of_cpu(), undisturbed=was_quiet)
