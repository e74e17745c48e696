"""What the meshes of a run or a model do not offer, said before a request is accepted.

They have published what they compute and draw, how they count pictures, and how long a context may be.
"""

from __future__ import annotations

from twinkle.core.adapter import Checkpoint
from twinkle.core.errors import InvalidInput, NotFound
from twinkle.core.mesh import WHOLE_MODEL, MeshCapabilities
from twinkle.core.operation_limits import SampleSize
from twinkle.core.pictures import PictureRules
from twinkle.server.state import ArtifactParts, CommonParts, QueueParts
from twinkle.wire.sampling import SampleRequest, count_prompt


def why_no_own_samples(capabilities: MeshCapabilities | None) -> str | None:
    """Why a run's weights cannot be sampled from where they are trained; None where they can."""
    if capabilities is None or capabilities.serves not in ("training", WHOLE_MODEL):
        return None
    return (
        "sampling_session_seq_id: nothing is sampled on the mesh of this run, which only trains; save the weights under"
        " a name (path) and sample from that checkpoint"
    )


def why_no_embeddings(capabilities: MeshCapabilities | None, loss: str) -> str | None:
    """Why a loss that compares embeddings cannot be computed there."""
    if capabilities is None or (capabilities.engine != "megatron" and capabilities.serves != WHOLE_MODEL):
        return None
    why = "it trains whole models" if capabilities.serves == WHOLE_MODEL else "its engine is megatron"
    return (
        f"loss_fn: {loss} compares embeddings, which the mesh of this run does not compute ({why}); train an adapter on"
        " a mesh whose engine is transformers"
    )


def refuse_whole_model(checkpoint: Checkpoint | None, field: str) -> None:
    """Raise ``InvalidInput`` for a checkpoint of a whole model: here adapters are sampled from, and base models."""
    if checkpoint is not None and checkpoint.config.is_whole_model:
        raise InvalidInput(
            field,
            f"{checkpoint.path} is a whole model, and samples are drawn here from base models and adapters on them;"
            " download it, and start a worker on its folder (TWINKLE_MODEL) or another server",
        )


async def capabilities_of_run(
    common: CommonParts, artifacts: ArtifactParts, queue: QueueParts, tenant: str, adapter_id: str
) -> MeshCapabilities | None:
    """What the mesh of an adapter has said of itself; None without such an adapter or mesh."""
    try:
        adapter = await common.sql.run(artifacts.adapters.find, adapter_id, tenant=tenant)
    except NotFound:
        return None
    mesh = await queue.meshes.find(adapter.mesh)
    return None if mesh is None else mesh.capabilities


def picture_rules(capabilities: MeshCapabilities, field: str) -> PictureRules | None:
    """How a mesh counts pictures of samples, if its model takes any; raises where it is the sampler that does not."""
    if capabilities.pictures is not None and capabilities.sampler != "torch":
        raise InvalidInput(field, f"holds a picture, but here {capabilities.sampler} draws samples, of text alone")
    return capabilities.pictures


async def count_sample(
    common: CommonParts, artifacts: ArtifactParts, queue: QueueParts, tenant: str, sample: SampleRequest
) -> SampleRequest:
    """A sample whose pictures all say how many tokens they are.

    Raises:
        InvalidInput: A picture is of no kind that is taken, is over a limit, or is not of the tokens it says.
        NotFound: There is no such sampling session.
    """
    if not sample.has_pictures:
        return sample
    known = await _capabilities_for(common, artifacts, queue, tenant, sample)
    rules = picture_rules(known[0], "prompt") if known else None
    return await common.object_io.run(count_prompt, sample, rules, common.settings.picture_limits)


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
    contexts = [one.max_context_length for one in await _capabilities_for(common, artifacts, queue, tenant, sample)]
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


async def _capabilities_for(
    common: CommonParts, artifacts: ArtifactParts, queue: QueueParts, tenant: str, sample: SampleRequest
) -> list[MeshCapabilities]:
    """What the meshes have said of themselves that serve the base model of a sample."""
    assert sample.sampling_session_id is not None, "what is sampled from is known by now"
    session = await common.sql.run(artifacts.sampling_sessions.find, sample.sampling_session_id, tenant=tenant)
    known = [mesh.capabilities for mesh in await queue.meshes.all() if mesh.capabilities is not None]
    return [one for one in known if one.base_model == session.base_model]
