"""An adapter: one tenant's trainable LoRA state on one base model. Tinker calls it a model, or a training run."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, Field

from twinkle.core.file_names import ENCRYPTED_SUFFIX, TRAINING_FILES
from twinkle.core.ids import new_id

WHOLE_MODEL = (
    "is missing, or of rank 0: the whole model would be trained, which needs a mesh for one tenant alone, and this"
    " server's meshes are shared; send a LoRA config"
)
"""What is said to whoever wants no adapter."""


WARNINGS = "warnings"
"""Under which a run's metadata says what of its config is not applied."""


class Dialect(StrEnum):
    """In which of the two HTTP dialects an adapter is trained. The values are stored; they never change."""

    TINKER = "tinker"
    TWINKLE = "twinkle"


class AdapterConfig(BaseModel, frozen=True):
    """What ``create_model`` asks for, with the seed made definite so that the start can be rebuilt at any time."""

    base_model: str
    rank: int = Field(ge=0)
    """0: there is no LoRA, all of the model's weights are trained."""
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = 32.0
    dialect: Dialect = Dialect.TINKER
    """The one that made it, and the only one that trains it: their clients number and wait differently."""
    peft: dict[str, Any] | None = None
    """What a PEFT config says beyond rank and alpha (target_modules, use_rslora), where the adapter came by one."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Backward passes a step, in the Twinkle dialect."""

    @property
    def is_whole_model(self) -> bool:
        """Whether all of the model's weights are trained, which takes a mesh for this run alone."""
        return self.rank == 0


class CheckpointKind(StrEnum):
    """What a checkpoint is for.

    ``training`` ones carry the optimizer state, the others only the weights: ``sampler`` ones to sample from here,
    ``external`` ones to take away.
    """

    TRAINING = "training"
    SAMPLER = "sampler"
    EXTERNAL = "external"

    @property
    def segment(self) -> Literal["weights", "sampler_weights", "external_weights"]:
        """Its place in a ``tinker://run/<segment>/name`` path."""
        match self:
            case CheckpointKind.TRAINING:
                return "weights"
            case CheckpointKind.SAMPLER:
                return "sampler_weights"
            case CheckpointKind.EXTERNAL:
                return "external_weights"


class Grant(BaseModel, frozen=True):
    """An owner's leave, given by a token, to read one content; what an operation that needs it is stored with.

    It says who allowed what, never the token, and stays good for that operation when the token has ended.
    """

    token: str
    """The token's id."""
    owner: str
    run: str
    content: str
    """What the path meant when leave was given: another content that takes its name is not covered."""


class StoredFile(BaseModel, frozen=True):
    """One file of a checkpoint in the object store."""

    key: str
    size_bytes: int
    sha256: str


class Checkpoint(BaseModel, frozen=True):
    """A tenant's named, immutable artifact. It exists only once it is complete and verified.

    Its path is a name that may come to mean something else; ``content`` is what it means now. Whatever outlives a
    request (a sampling session, a URL, a token, an accepted load) is bound to the content, never to the path.
    """

    path: str
    tenant: str
    adapter: str
    kind: CheckpointKind
    name: str
    seq: int
    config: AdapterConfig
    files: dict[str, StoredFile]
    created_at: float
    expires_at: float | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    listed: bool = True
    """False for nameless sampler weights that earlier versions stored; they have an end."""
    content: str = Field(default_factory=new_id)
    """One save's result: no other content, saved before or later, has this id."""
    generation: int = 0
    """Raised whenever the owner takes back what was given out: URLs and strangers' sessions of before end."""

    @property
    def is_encrypted(self) -> bool:
        """Whether only the holder of an age key can read its files."""
        return any(name.endswith(ENCRYPTED_SUFFIX) for name in self.files)

    @property
    def weight_files(self) -> dict[str, StoredFile]:
        """Its files without those of the training: what whoever only uses the adapter takes away."""
        return {name: file for name, file in self.files.items() if name not in TRAINING_FILES}

    @property
    def size_bytes(self) -> int:
        """Bytes in the object store."""
        return sum(file.size_bytes for file in self.files.values())
