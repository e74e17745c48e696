"""The sampler of a script over one that is stepped: every call runs its requests to their end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from twinkle.checkpoint_engine.ends import CheckpointReceiver
from twinkle.core.errors import InvalidInput, StaleWeights
from twinkle.data_format.continuation import Texts
from twinkle.data_format.sampling import SampleResponses, SamplingParams
from twinkle.infra.device_mesh import current_rank
from twinkle.infra.remote import remote_function
from twinkle.sampler.request import Adapter, SampleRequest, SampleResult
from twinkle.sampler.scripts.adapters import KnownAdapters
from twinkle.sampler.scripts.base import Params, Row, Sampler
from twinkle.sampler.scripts.groups import as_rows
from twinkle.sampler.scripts.rows import request_of, response_of
from twinkle.sampler.stepped import SteppedSampler

SEED_LIMIT = 2**62
SEEDS_OF_A_RANK = 2**40
"""Ranks are seeded alike and shall not draw alike, however many rows each has."""
NAMES_KEPT_ASLEEP = ("weights", "kv_cache")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class SteppingSampler(CheckpointReceiver, Sampler):
    """Continues prompts on a stepped sampler of its own, that nobody else adds requests to.

    Args:
        stepped: What computes.
        tokenizer: Of the base model; without one no text comes back, unless a template with a tokenizer is set.
    """

    def __init__(self, stepped: SteppedSampler, *, tokenizer: Any = None) -> None:
        self.stepped = stepped
        self.tokenizer = tokenizer
        self._adapters = KnownAdapters(stepped.load_adapter)
        self._asleep: frozenset[str] = frozenset()
        self._is_shut_down = False

    def sample(
        self,
        inputs: Sequence[Row] | Row,
        sampling_params: Params = None,
        adapter_name: str = "",
        adapter_path: str | Path | None = None,
        *,
        num_samples: int | None = None,
        return_encoded: bool = False,
        use_base_model: bool = False,
    ) -> SampleResponses:
        """Continue every row and wait for all.

        Args:
            inputs: Token ids, rows with ``input_ids``, or conversations if a template is set; or one of these.
            sampling_params: The same for all rows. A seed that is left out is drawn out of torch's random numbers.
            adapter_name: One that was added; empty for the weights of the last sync, else the base model.
            adapter_path: A PEFT directory, instead of a name. Read at every call, so it is never stale.
            num_samples: The old form: how many of each row, above the params; logprobs come back unasked, as numbers.
            return_encoded: Taken for the sake of old scripts; every ``new_input_feature`` holds its tokens.
            use_base_model: Sample the base model whatever the adapter.

        Returns:
            One response for each row, in their order; ``.sequences`` has the sequences of all.

        Raises:
            InvalidInput: A row or a parameter is outside its limits, or the adapter is unknown or cannot be read.
            RuntimeError: Requests are under way already, or the sampler is asleep or shut down.
            StaleWeights: A sync of its weights broke off.
        """
        self._require_ready()
        params = _params(sampling_params, num_samples)
        adapter = None if use_base_model else self._adapters.find(adapter_name, adapter_path)
        rows = [self._encoded(row) for row in as_rows(inputs)]
        requests = self._requests(rows, params, adapter)
        results = self._run(requests)
        texts = self._texts()
        is_old_form = num_samples is not None
        return SampleResponses(
            response_of(
                results[request.key],
                row,
                params,
                texts=texts,
                plain_logprobs=is_old_form,
                weights_version=self.weights_version,
            )
            for request, row in zip(requests, rows, strict=True)
        )

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def sample_stream(
        self,
        inputs: Row | Sequence[Row],
        sampling_params: Params = None,
        adapter_name: str = "",
        adapter_path: str | Path | None = None,
        *,
        use_base_model: bool = False,
    ) -> Iterator[tuple[str, str | None]]:
        """Continue one row and yield ``(text, None)`` as it grows, at last ``(rest, stop_reason)``.

        An iterator that is given up before its end frees what it holds when it is closed.

        Raises:
            InvalidInput: As ``sample``; more than one row or sample; or there is no tokenizer.
            RuntimeError: The sampler is asleep or shut down; also if that comes on the way.
            StaleWeights: As ``sample``; or, on the way, a sync has brought others than those that it began with.
        """
        rows = [self._encoded(row) for row in as_rows(inputs)]
        params = _params(sampling_params, None)
        if len(rows) != 1 or params.num_samples != 1:
            raise InvalidInput("inputs", f"{len(rows)} rows of {params.num_samples} samples; a stream has one of one")
        self._require_ready()
        read = self._texts().read
        if read is None:
            raise InvalidInput("inputs", "cannot be streamed as text without a tokenizer; call set_template before")
        adapter = None if use_base_model else self._adapters.find(adapter_name, adapter_path)
        (request,) = self._requests(rows, params, adapter)
        return self._stream(request, read, self.weights_version)

    def _stream(self, request: SampleRequest, read: Any, version: int) -> Iterator[tuple[str, str | None]]:
        tokens: list[int] = []
        told = ""
        try:
            self.stepped.add(request)
            while True:
                # Between two pieces a script may do anything.
                self._require_ready()
                self._require_version(version)
                for outcome in self.stepped.step():
                    if isinstance(outcome, tuple):
                        raise outcome[1]
                    (sequence,) = outcome.sequences
                    yield read(sequence.tokens.tolist())[len(told) :], sequence.stop_reason
                    return
                for stretch in self.stepped.drawn_so_far(request.key, [len(tokens)]):
                    tokens[stretch.start :] = stretch.tokens
                text = read(tokens)
                # A character may be cut in the middle; a text begun anew may be shorter.
                if len(text) > len(told) and not text.endswith(REPLACEMENT):
                    yield text[len(told) :], None
                    told = text
        finally:
            self.stepped.cancel(request.key)

    # Adapters and weights.

    def add_adapter_to_sampler(self, adapter_name: str, config: Any) -> None:
        """Make an adapter known: its directory, or a PEFT config whose weights a sync brings later.

        Raises:
            InvalidInput: The name is empty, or the directory holds no adapter that fits.
        """
        self._adapters.add(adapter_name, config)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def receive_adapter(self, files: Mapping[str, bytes], adapter_name: str = "") -> None:
        """Take over the adapter of a training; calls without an adapter sample with it from here on."""
        self._adapters.sync(files, adapter_name)

    def receive_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over the weights of a training, by transformers' names; an adapter that was synced before is forgotten.

        Raises:
            InvalidInput: A name or a shape is not the model's.
        """
        self.stepped.load_weights(weights)
        self._adapters.forget_synced()

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def get_state_keys(self) -> list[str]:
        """The names of the base model's weights."""
        return self.stepped.weight_names()

    # Memory.

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def reset_prefix_cache(self) -> None:
        """Forget what was computed of prompts. A sync needs none: what belongs to other weights is never used."""
        self.stepped.forget_prompts()

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def reset_mm_cache(self) -> None:
        """Forget what was made of pictures, with the prompts that they are part of."""
        self.stepped.forget_prompts()

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def reset_encoder_cache(self) -> None:
        """See ``reset_mm_cache``."""
        self.stepped.forget_prompts()

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def sleep(self, level: int = 1) -> None:
        """Give up what can be computed again, while something else needs the memory; the weights stay.

        Until ``wake_up`` a call to ``sample`` is refused.
        """
        if level not in (1, 2):
            raise InvalidInput("level", f"is {level}; send 1 or 2")
        self.stepped.forget_prompts()
        self._asleep = frozenset(NAMES_KEPT_ASLEEP)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Serve again; with ``tags`` (``weights``, ``kv_cache``) once both have been named."""
        unknown = set(tags or ()) - set(NAMES_KEPT_ASLEEP)
        if unknown:
            raise InvalidInput("tags", f"hold {min(unknown)}; send {' or '.join(NAMES_KEPT_ASLEEP)}")
        self._asleep -= set(NAMES_KEPT_ASLEEP if tags is None else tags)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def shutdown(self) -> None:
        """Free what the sampler holds. It cannot be used after that."""
        self._is_shut_down = True
        self.stepped.shutdown()

    # What calls are made of.

    def _encoded(self, row: Row) -> Mapping[str, Any]:
        if not isinstance(row, Mapping):
            return {"input_ids": list(row)}
        return row if "input_ids" in row else self.encode_trajectory(row)

    def decode_response(self, token_ids: Sequence[int], adapter_name: str = "") -> str:
        """The text of sampled tokens, without special tokens.

        Raises:
            InvalidInput: There is neither a tokenizer beside the model nor a template with one.
        """
        read = self._texts().read
        return super().decode_response(token_ids) if read is None else read(token_ids)

    def _texts(self) -> Texts:
        tokenizer = self.tokenizer or getattr(self.template, "tokenizer", None)
        if tokenizer is None:
            return Texts()
        return Texts(
            decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False)),
            read=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
            parse_tool_calls=getattr(self.template, "parse_tool_call", None),
        )

    def _requests(
        self, rows: Sequence[Mapping[str, Any]], params: SamplingParams, adapter: Adapter | None
    ) -> list[SampleRequest]:
        if params.seed is not None:
            # Equal rows get equal samples: that is what a seed is asked for.
            return [
                request_of(row, params, key=str(i), adapter=adapter, seed=params.seed) for i, row in enumerate(rows)
            ]
        # Out of torch's, so that a seeded script repeats itself.
        seed = int(torch.randint(SEED_LIMIT, ())) + current_rank() * SEEDS_OF_A_RANK
        return [request_of(row, params, key=str(i), adapter=adapter, seed=seed + i) for i, row in enumerate(rows)]

    def _run(self, requests: Sequence[SampleRequest]) -> dict[str, SampleResult]:
        if self.stepped.num_requests:
            raise RuntimeError(
                f"{self.stepped.num_requests} requests are under way; step the sampler until they have ended"
            )
        results: dict[str, SampleResult] = {}
        try:
            for request in requests:
                self.stepped.add(request)
            while self.stepped.has_work:
                for outcome in self.stepped.step():
                    if isinstance(outcome, tuple):
                        raise outcome[1]
                    results[outcome.key] = outcome
        finally:
            for request in requests:
                self.stepped.cancel(request.key)
        return results

    def _require_ready(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("the sampler was shut down; make another one")
        self.require_settled_weights()
        if self._asleep:
            raise RuntimeError(f"the sampler is asleep ({', '.join(sorted(self._asleep))}); call wake_up() first")

    def _require_version(self, version: int) -> None:
        if self.weights_version != version:
            raise StaleWeights(
                f"the stream began with weights version {version}, and the sampler has {self.weights_version} now; ask"
                " again"
            )


def _params(given: Params, num_samples: int | None) -> SamplingParams:
    params = given or SamplingParams()
    if not isinstance(params, SamplingParams):
        params = SamplingParams.from_dict(params)
    return params if num_samples is None else replace(params, num_samples=num_samples)
