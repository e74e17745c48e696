"""A mesh: a named, fixed set of device ranks that serves one frozen base model."""

from __future__ import annotations

from pydantic import BaseModel

from twinkle.core.adapter_sizes import AdapterSizes
from twinkle.core.pictures import PictureRules

WHOLE_MODEL = "whole-model"
"""What a mesh serves that trains all of its model's weights, of one run at a time."""


class MeshAnnouncement(BaseModel, frozen=True):
    """What a mesh will serve once its worker, which is starting, has loaded the model."""

    base_model: str
    serves: str = "everything"
    """As of :class:`MeshCapabilities`."""

    @classmethod
    def of(cls, *, model_name: str, engine: str, serves: str) -> MeshAnnouncement:
        """By what a worker is started with. Megatron's layers are trained, and not sampled from."""
        is_training = engine == "megatron" and serves == "everything"
        return cls(base_model=model_name or "null", serves="training" if is_training else serves)


class MeshCapabilities(BaseModel, frozen=True):
    """What a mesh's worker publishes about itself when it starts."""

    base_model: str
    architecture: str
    vocab_size: int
    max_context_length: int
    max_rank: int
    device: str
    determinism: str
    """What holds for bit-equality of fused and replayed operations.

    ``mkl-strict`` or ``tiled``: one has the bits it has alone, whatever it was fused with. ``unfused``: they share no
    pass, and one done again on as many ranks has the same bits. ``none``: neither was shown.
    """
    engine: str = "transformers"
    """``transformers`` or ``megatron``: whose layers they are."""
    tensor_parallel: int = 1
    """Over how many of the ranks the tensors of a layer are split."""
    pipeline_parallel: int = 1
    """Over how many of them the layers are."""
    expert_parallel: int = 1
    """Over how many of them the experts are."""
    sampler: str = "torch"
    """``torch`` or ``vllm``: what computes samples."""
    tokenizer_path: str | None = None
    """A folder clients on the same machine can read the tokenizer from."""
    pictures: PictureRules | None = None
    """How its model counts the tokens of pictures; none: it takes text alone."""
    ranks: int = 1
    """Devices it computes on; results depend on their number in the last bits."""
    shard: str = "replicate"
    """``replicate``: each rank holds the base model whole; ``fsdp``: its layers are spread over them."""
    threads: int = 0
    """Of each rank, on a CPU."""
    threads_measured: dict[str, int] = {}
    """What was measured at the first start with a model, on a kind of CPU, and is kept to."""
    adapter_slots: int = 0
    """Adapters that lie ready on its devices at once; those beyond are parked. 0: it has not said."""
    adapter_bytes: int = 0
    """Device memory for adapters that train and for copies that are sampled from. 0: it sets no bound."""
    quantisation: str = "none"
    """``int8``: its frozen Linears are rounded to eight bits, on which adapters train and are sampled."""
    quantisation_error: float = 0.0
    """By how much that has changed any of their weights, at most, in parts of its norm."""
    memory_bytes: int = 0
    """Memory of each of its devices that everything on it may take together. 0: it has not said."""
    memory_held: dict[str, int] = {}
    """Who holds how much of that on the first of them, by its last word."""
    serves: str = "everything"
    """``everything``; ``samples`` alone: no run is trained on it; ``training`` alone: nothing is sampled on it;
    ``whole-model``: one run at a time, of all the model's weights.
    """
    adapter_sizes: AdapterSizes | None = None
    """How large adapters on its model are; none: its engine has no adapters to speak of."""

    def why_not_on(self, other: MeshCapabilities) -> str | None:
        """Why an adapter of this mesh could not go on on another one; ``None`` where it can."""
        for name in ("base_model", "architecture", "vocab_size", "max_context_length", "quantisation"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"its {name} is {theirs}, not {ours}"
        if other.serves != self.serves and (self.serves, other.serves) != ("training", "everything"):
            return f"it serves {other.serves}, not {self.serves}"
        if other.max_rank < self.max_rank:
            return f"it takes adapters up to rank {other.max_rank}, not {self.max_rank}"
        if self.pictures is not None and self.pictures != other.pictures:
            return "it does not take the same pictures"
        return None
