"""What the wire says of passes and samples in the words of model and sampler, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from twinkle.core.pictures import PictureRules
from twinkle.model.fused.training import Datum, TrainJob, TrainOutcome
from twinkle.model.pictures import Patches, Picture
from twinkle.module.lora import LoraAdapter
from twinkle.sampler.request import SampleRequest as SamplerRequest
from twinkle.sampler.request import SampleResult as SamplerResult
from twinkle.sampler.request import TopLogprobs
from twinkle.wire.patches import WirePatches
from twinkle.wire.pictures import WirePicture
from twinkle.wire.sample_result import (
    PromptAltTokens,
    SampleResult,
    TopkLogprobs,
    WireSequence,
    encode_sample_response,
)
from twinkle.wire.sampling import SampleRequest
from twinkle.wire.tensors import Array, CellBudget, Csr, densify
from twinkle.wire.training import ForwardBackwardBody
from twinkle.wire.training_result import ForwardBackwardResult, elementwise_loss
from twinkle.workers.engine import Pass, SampleOutput

_MAX_TARGET_CELLS = 1 << 24


def train_job(
    item: Pass[Any], adapter: LoraAdapter, body: ForwardBackwardBody, *, base_adapter: LoraAdapter
) -> TrainJob:
    """A pass of one adapter, or of ``base_adapter``, which changes nothing, where it is to be the base model's."""
    return TrainJob(
        adapter=base_adapter if body.without_adapter else adapter,
        data=tuple(
            Datum(datum.tokens, datum.inputs, _pictures(datum.pictures or datum.patches, item.cache_group))
            for datum in body.data
        ),
        loss=body.loss_fn,
        loss_config=body.loss_fn_config,
        backward=not body.forward_only,
        graph=body.loss_graph,
        is_again=item.is_again,
    )


def wire_result(outcome: TrainOutcome, body: ForwardBackwardBody) -> ForwardBackwardResult:
    """What a pass came to."""
    losses = elementwise_loss(body, outcome.logprobs)
    return ForwardBackwardResult(
        tuple(outcome.logprobs), dict(outcome.metrics), losses, embeddings=tuple(outcome.embeddings)
    )


def sampler_request(
    request_id: str,
    adapter: LoraAdapter | None,
    request: SampleRequest,
    targets: Array | Csr | None,
    rules: PictureRules | None,
    *,
    cache_group: str,
) -> SamplerRequest:
    """A sample on an adapter's weights, or on the base model.

    Raises:
        InvalidInput: Prompt and pictures do not fit together.
    """
    params = request.sampling_params
    assert params.seed is not None, "the API makes every seed definite"
    tokens, pictures = request.read_prompt(rules)
    return SamplerRequest(
        key=request_id,
        adapter=adapter,
        prompt=tuple(tokens),
        pictures=_pictures(pictures, cache_group),
        seed=params.seed,
        num_samples=request.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        repetition_penalty=params.repetition_penalty,
        stop_token_ids=None if params.stops_at_end_of_text else frozenset(params.stop_tokens),
        stop_strings=tuple(params.stop_strings),
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=None if targets is None else _dense(targets),
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        cache_group=cache_group,
    )


def sample_output(result: SamplerResult, targets: Array | Csr | None) -> SampleOutput:
    """A sample that has ended; ``targets`` are those whose scores it asked for."""
    alternatives = result.prompt_alt_tokens
    wire = SampleResult(
        sequences=tuple(
            WireSequence(
                tokens=sequence.tokens,
                logprobs=sequence.logprobs,
                stop_reason=sequence.stop_reason,
                topk=_wire_topk(sequence.topk),
            )
            for sequence in result.sequences
        ),
        prompt_logprobs=result.prompt_logprobs,
        topk_prompt_logprobs=_wire_topk(result.topk_prompt_logprobs),
        target_prompt_logprobs=_in_layout_of(targets, result.target_prompt_logprobs),
        prompt_alt_tokens=None
        if alternatives is None
        else PromptAltTokens(alternatives.token_ids, alternatives.logprobs),
        prompt_cache_hit_tokens=result.num_cached_tokens,
    )
    num_tokens = sum(len(sequence.tokens) for sequence in result.sequences)
    return SampleOutput(request_id=result.key, result=encode_sample_response(wire), num_tokens=num_tokens)


def _pictures(pictures: Sequence[WirePicture | WirePatches], group: str) -> tuple[Picture, ...]:
    return tuple(Picture(picture.start, picture.num_tokens, _content(picture), group) for picture in pictures)


def _content(picture: WirePicture | WirePatches) -> bytes | Patches:
    return picture.data if isinstance(picture, WirePicture) else Patches(picture.pixel_values, picture.grid_thw)


def _wire_topk(topk: TopLogprobs | None) -> TopkLogprobs | None:
    return None if topk is None else TopkLogprobs(topk.token_ids, topk.logprobs)


def _dense(targets: Array | Csr) -> Array:
    return densify(targets, field="target_prompt_logprobs", budget=CellBudget(_MAX_TARGET_CELLS))


def _in_layout_of(targets: Array | Csr | None, logprobs: Array | None) -> Array | Csr | None:
    """Scores in the layout the targets came in: sparse for sparse."""
    if logprobs is None or not isinstance(targets, Csr):
        return logprobs
    rows = np.repeat(np.arange(targets.shape[0]), np.diff(targets.crow_indices))
    values = logprobs[rows, targets.col_indices]
    return Csr(values, targets.crow_indices, targets.col_indices, targets.shape)
