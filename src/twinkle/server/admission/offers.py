"""What the mesh of a run does not offer, said before a request is accepted."""

from __future__ import annotations

from twinkle.core.adapter import Checkpoint
from twinkle.core.errors import InvalidInput
from twinkle.core.mesh import WHOLE_MODEL, MeshCapabilities


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
