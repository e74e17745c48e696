"""Samples as large as their limits allow, by what their model's context holds."""

from __future__ import annotations

from twinkle.core.operation_limits import SampleSize
from twinkle.server.state import ArtifactParts, CommonParts, QueueParts
from twinkle.wire.sampling import SampleRequest


async def check_sample(
    common: CommonParts, artifacts: ArtifactParts, queue: QueueParts, tenant: str, sample: SampleRequest
) -> None:
    """Let a sample pass that no limit forbids; what it would draw beyond its context is not counted.

    Raises:
        InvalidInput: It is too large; it names the limit, and what would pass.
        NotFound: There is no such sampling session.
    """
    params = sample.sampling_params
    limits = common.settings.operation_limits
    if params.max_tokens is not None and limits.allow(size_of(sample, params.max_tokens)):
        return
    assert sample.sampling_session_id is not None, "what is sampled from is known by now"
    session = await common.sql.run(artifacts.sampling_sessions.find, sample.sampling_session_id, tenant=tenant)
    known = [mesh.capabilities for mesh in await queue.meshes.all() if mesh.capabilities is not None]
    contexts = [one.max_context_length for one in known if one.base_model == session.base_model]
    if contexts:
        room = max(max(contexts) - sample.num_prompt_tokens, 0)
        limits.check_sample(size_of(sample, room if params.max_tokens is None else min(params.max_tokens, room)))
    elif params.max_tokens is not None:
        limits.check_sample(size_of(sample, params.max_tokens))


def size_of(sample: SampleRequest, num_drawn: int) -> SampleSize:
    """What a request asks for, if each sequence has so many tokens."""
    targets = sample.target_prompt_logprobs
    shape = () if targets is None else targets.shape or ()
    return SampleSize(
        num_prompt_tokens=sample.num_prompt_tokens,
        num_samples=sample.num_samples,
        num_drawn=num_drawn,
        num_alternatives=sample.topk_sample_logprobs,
        scores_per_prompt_token=bool(sample.prompt_logprobs)
        + 2 * (sample.topk_prompt_logprobs + sample.prompt_alt_tokens_k)
        + (shape[1] if len(shape) == 2 else 0),
        stops=sample.sampling_params.stop_strings,
    )
