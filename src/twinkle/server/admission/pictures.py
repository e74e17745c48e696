"""Pictures in a request, judged before it is accepted: by the rules that the model's worker has published."""

from __future__ import annotations

from twinkle.core.errors import InvalidInput, NotFound
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.pictures import PictureRules
from twinkle.server.state import ArtifactParts, CommonParts, QueueParts
from twinkle.wire.sampling import SampleRequest, count_prompt


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
    assert sample.sampling_session_id is not None, "what is sampled from is known by now"
    session = await common.sql.run(artifacts.sampling_sessions.find, sample.sampling_session_id, tenant=tenant)
    known = [mesh.capabilities for mesh in await queue.meshes.all() if mesh.capabilities is not None]
    capabilities = next((one for one in known if one.base_model == session.base_model), None)
    rules = None if capabilities is None else picture_rules(capabilities, "prompt")
    return await common.object_io.run(count_prompt, sample, rules, common.settings.picture_limits)
