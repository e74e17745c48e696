"""What the mesh of a run does not offer, said before a request is accepted."""

from __future__ import annotations

from twinkle.core.mesh import MeshCapabilities


def why_no_own_samples(capabilities: MeshCapabilities | None) -> str | None:
    """Why a run's weights cannot be sampled from where they are trained; None where they can."""
    if capabilities is None or capabilities.serves != "training":
        return None
    return (
        "sampling_session_seq_id: nothing is sampled on the mesh of this run, which only trains; save the weights under"
        " a name (path) and sample from that checkpoint"
    )


def why_no_embeddings(capabilities: MeshCapabilities | None, loss: str) -> str | None:
    """Why a loss that compares embeddings cannot be computed there."""
    if capabilities is None or capabilities.engine != "megatron":
        return None
    return (
        f"loss_fn: {loss} compares embeddings, which the mesh of this run does not compute (its engine is megatron);"
        " train on a mesh whose engine is transformers"
    )
