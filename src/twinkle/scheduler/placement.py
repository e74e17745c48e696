"""Where a new adapter goes: to the mesh of its base model that has the least to do."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle.core.errors import InvalidInput, MeshUnavailable
from twinkle.core.model_names import plain_model_name
from twinkle.storage.journal.meshes import MeshStatus


def choose_mesh(meshes: Sequence[MeshStatus], base_model: str) -> MeshStatus:
    """The mesh that serves ``base_model``: one with a live worker if there is any, then the one with the least load.

    The load of a mesh is the tokens it was served lately, and for each live adapter that brought none as many as those
    that did came to on average: a client that has just come, or pauses, will bring some too. Adapters whose clients
    have gone count for nothing, however many there are.

    Raises:
        InvalidInput: Other models are served here, this one is not.
        MeshUnavailable: No mesh has ever said what it serves.
    """
    served = [mesh for mesh in meshes if mesh.capabilities is not None]
    if not served:
        raise MeshUnavailable("no worker has started yet, so no base model is served; try again in a moment")
    by_name = [(mesh, mesh.capabilities.base_model) for mesh in served if mesh.capabilities is not None]
    fitting = [mesh for mesh, name in by_name if name == base_model] or [
        mesh for mesh, name in by_name if plain_model_name(name) == plain_model_name(base_model)
    ]
    if not fitting:
        names = sorted({mesh.capabilities.base_model for mesh in served if mesh.capabilities is not None})
        raise InvalidInput("base_model", f"{base_model!r} is not served here; this server serves: {', '.join(names)}")
    num_served = sum(mesh.num_served for mesh in fitting)
    mean_tokens = sum(mesh.recent_tokens for mesh in fitting) / max(num_served, 1)
    return min(
        fitting,
        key=lambda mesh: (
            not mesh.alive,
            mesh.recent_tokens + mean_tokens * max(mesh.num_live - mesh.num_served, 0),
            mesh.num_live,
            mesh.name,
        ),
    )
