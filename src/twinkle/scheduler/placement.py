"""Where a new adapter goes, and those of a mesh that is drained: to a mesh of their model that has little to do."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from twinkle.core.adapter import WHOLE_MODEL
from twinkle.core.errors import InvalidInput, MeshUnavailable
from twinkle.core.mesh import WHOLE_MODEL as SERVES_WHOLE
from twinkle.core.model_names import plain_model_name
from twinkle.storage.journal.meshes import MeshStatus


def choose_mesh(
    meshes: Sequence[MeshStatus], base_model: str, *, to_sample: bool = False, whole_model: bool | None = False
) -> MeshStatus:
    """The mesh that serves ``base_model``: one with a live worker if there is any, then the one with the least load.

    Who only samples goes to a mesh that does nothing else, if one is alive; runs are never trained there. A run that
    trains the whole model (``whole_model``) goes to a mesh for one such run alone, and nothing else does; ``None`` is
    for whoever asks what is served, whatever for.

    The load of a mesh is the tokens it was served lately, and for each live adapter that brought none as many as those
    that did came to on average: a client that has just come, or pauses, will bring some too. Adapters whose clients
    have gone count for nothing, however many there are.

    Raises:
        InvalidInput: Other models are served here, this one is not, or not for this.
        MeshUnavailable: No mesh has ever said what it serves, or the one that would do is starting.
    """
    try:
        return _choose(meshes, base_model, to_sample=to_sample, whole_model=whole_model)
    except InvalidInput:
        if not any(_is_coming(mesh, base_model, to_sample=to_sample, whole_model=whole_model) for mesh in meshes):
            raise
    what = "samples from" if to_sample else "serves" if whole_model is None else "trains"
    raise MeshUnavailable(f"the worker that {what} {base_model!r} is starting; try again in a moment")


def _is_coming(mesh: MeshStatus, base_model: str, *, to_sample: bool, whole_model: bool | None) -> bool:
    """Whether a mesh whose worker starts will be for this."""
    coming = mesh.announced
    if coming is None or mesh.is_draining or plain_model_name(coming.base_model) != plain_model_name(base_model):
        return False
    if whole_model is None:
        return True
    if whole_model:
        return coming.serves == SERVES_WHOLE
    return coming.serves in ("everything", "samples" if to_sample else "training")


def _choose(meshes: Sequence[MeshStatus], base_model: str, *, to_sample: bool, whole_model: bool | None) -> MeshStatus:
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
    fitting = [mesh for mesh in fitting if not mesh.is_draining]
    if not fitting:
        raise MeshUnavailable(f"every mesh that serves {base_model!r} is being drained; try again in a moment")
    if whole_model is not None:
        fitting = _by_what_they_train(fitting, base_model, whole_model=whole_model)
    if whole_model is False:
        fitting = _by_what_they_serve(fitting, to_sample=to_sample)
    if not fitting:
        what = "to train, not to sample from" if to_sample else "to sample from, not to train"
        raise InvalidInput("base_model", f"{base_model!r} is served here {what}")
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


def _by_what_they_train(meshes: Sequence[MeshStatus], base_model: str, *, whole_model: bool) -> list[MeshStatus]:
    whole = [mesh for mesh in meshes if mesh.capabilities is not None and mesh.capabilities.serves == SERVES_WHOLE]
    found = whole if whole_model else [mesh for mesh in meshes if mesh not in whole]
    if found:
        return found
    if whole_model:
        raise InvalidInput("lora_config", WHOLE_MODEL)
    raise InvalidInput(
        "base_model",
        f"{base_model!r} is served here to train all of its weights, of one run at a time; leave the LoRA config out"
        " (create_full_training_client, add_adapter_to_model(name, None)), or ask for another model",
    )


def _by_what_they_serve(meshes: Sequence[MeshStatus], *, to_sample: bool) -> list[MeshStatus]:
    samplers = [mesh for mesh in meshes if mesh.capabilities is not None and mesh.capabilities.serves == "samples"]
    if not to_sample:
        return [mesh for mesh in meshes if mesh not in samplers]
    trainers = [mesh for mesh in meshes if mesh.capabilities is not None and mesh.capabilities.serves == "training"]
    return [mesh for mesh in samplers if mesh.alive] or [mesh for mesh in meshes if mesh not in trainers]


def spread(lanes: Sequence[str], source: MeshStatus, meshes: Sequence[MeshStatus]) -> dict[str, list[str]]:
    """Where the lanes of a mesh that is drained go, by the name of the mesh: each to the one with the fewest adapters.

    Meshes without a worker take nothing. Where the operator named one, all go there; where none fits, all stay.
    """
    if source.capabilities is None:
        return {}
    fitting = [
        mesh
        for mesh in meshes
        if mesh.capabilities is not None
        and mesh.alive
        and not mesh.is_draining
        and source.drains_to in {None, mesh.name}
        and source.capabilities.why_not_on(mesh.capabilities) is None
    ]
    load = [(mesh.num_live, mesh.name) for mesh in fitting]
    heapq.heapify(load)
    places: dict[str, list[str]] = {}
    for lane in lanes if load else ():
        count, name = load[0]
        places.setdefault(name, []).append(lane)
        heapq.heapreplace(load, (count + 1, name))
    return places
