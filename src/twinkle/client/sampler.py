"""Samples from one set of weights: every call returns a future at once, and they may end in any order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from twinkle.client.bodies import make_body, to_json
from twinkle.client.connection import Connection
from twinkle.client.datum import Tokens, to_chunks
from twinkle.client.errors import ClientClosed
from twinkle.client.future import Future
from twinkle.client.transport import TINKER_PREFIX, Request
from twinkle.wire.sample_result import SampleResult
from twinkle.wire.sampling import Prompt, SampleRequest, SamplingParams


class Sampler:
    """Draws from a base model or a checkpoint. Safe to use from any thread."""

    def __init__(self, connection: Connection, sampler_id: str) -> None:
        """Use :class:`Client`'s ``sampler``."""
        self.id = sampler_id
        self._connection = connection
        self._numbers = itertools.count()

    def sample(
        self,
        prompt: Tokens,
        *,
        max_tokens: int,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | Sequence[int] | None = None,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
    ) -> Future[SampleResult]:
        """Draw ``num_samples`` continuations of one prompt of token ids.

        Args:
            prompt: (N,) token ids, or a list of such pieces with pictures between.
            max_tokens: How many tokens a sample may have.
            num_samples: How many samples.
            temperature: 0 takes the likeliest token each time.
            top_k: Only the k likeliest tokens; -1 for all.
            top_p: Only the likeliest tokens that together have this probability.
            seed: The same seed draws the same samples.
            stop: Texts or token ids that end a sample; ``None`` means the model's own end, an empty list none at all.
            prompt_logprobs: Whether to score the prompt's tokens.
            topk_prompt_logprobs: How many of the likeliest tokens to score at each place of the prompt.
            topk_sample_logprobs: The same at each place of a sample.

        Raises:
            InvalidInput: It cannot be sent; the server judges the rest.
            ClientClosed: The client is closed.
        """
        chunks = to_chunks(prompt, field="prompt")
        params = make_body(
            SamplingParams,
            max_tokens=max_tokens,
            seed=seed,
            stop=stop if stop is None or isinstance(stop, str) else list(stop),
            temperature=float(temperature),
            top_k=top_k,
            top_p=float(top_p),
        )
        body = make_body(
            SampleRequest,
            prompt=Prompt(chunks=chunks),
            sampling_params=params,
            num_samples=num_samples,
            sampling_session_id=self.id,
            seq_id=next(self._numbers),
            prompt_logprobs=prompt_logprobs or None,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
        )
        future = self._connection.new_future(for_sample=True)
        request = Request(path=f"{TINKER_PREFIX}/asample", content=to_json(body))
        self._connection.call_soon(self._arrive, request, future)
        return future

    def _arrive(self, request: Request, future: Future[Any]) -> None:
        self._connection.note_unsent(1)
        self._connection.spawn(self._send(request, future))

    async def _send(self, request: Request, future: Future[Any]) -> None:
        try:
            if future.begin():
                await self._connection.submit(request, future)
        except Exception as error:  # noqa: BLE001 - the border: whoever waits hears of it, or would wait for ever
            future.set_exception(error)
        except asyncio.CancelledError:
            future.set_exception(ClientClosed("closed before this sample was accepted"))
            raise
        finally:
            self._connection.note_unsent(-1)
