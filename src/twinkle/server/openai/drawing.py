"""What is drawn, and from which model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from twinkle.core.adapter import Checkpoint, CheckpointKind
from twinkle.core.errors import InvalidInput, NotFound
from twinkle.core.mesh import MeshCapabilities
from twinkle.scheduler.placement import choose_mesh
from twinkle.server.admission.offers import refuse_whole_model
from twinkle.server.fine_tuned import PREFIX
from twinkle.server.model_texts import TextModel
from twinkle.server.state import Artifacts, Common, Queue
from twinkle.wire.bodies.openai import DrawRequest
from twinkle.wire.paths import OTHER_SCHEME, SCHEME, is_model_id, parse_checkpoint_path
from twinkle.wire.sampling import Prompt, PromptChunk

# Not exports: those are to be taken away.
_SAMPLED = (CheckpointKind.SAMPLER, CheckpointKind.TRAINING)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model as a request names it, what the name means now, and the mesh that serves it."""

    name: str
    base_model: str
    checkpoint: Checkpoint | None
    mesh: str
    capabilities: MeshCapabilities


@dataclass(frozen=True)
class PlacedPicture:
    """A picture whose tokens begin at ``start`` of a prompt."""

    start: int
    chunk: PromptChunk


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What is drawn from one prompt. ``stops`` are texts; the model's own end always stops too.

    ``pictures`` lie among the tokens, each as a chunk of a prompt at the place of its first token.
    """

    tokens: list[int]
    pictures: tuple[PlacedPicture, ...]
    num_samples: int
    max_tokens: int
    topk: int
    stops: tuple[str, ...]
    temperature: float
    top_p: float
    seed: int | None

    def prompt(self) -> Prompt:
        """The prompt as the queue has it."""
        return prompt_of(self.tokens, self.pictures)


def prompt_of(tokens: Sequence[int], pictures: Sequence[PlacedPicture]) -> Prompt:
    """Tokens with pictures among them, as the queue has a prompt."""
    chunks: list[PromptChunk] = []
    position = 0
    for picture in pictures:
        if position < picture.start:
            chunks.append(PromptChunk(tokens=list(tokens[position : picture.start])))
        chunks.append(picture.chunk)
        position = picture.start + picture.chunk.length
    if position < len(tokens):
        chunks.append(PromptChunk(tokens=list(tokens[position:])))
    return Prompt(chunks=chunks)


async def find_model(common: Common, queue: Queue, artifacts: Artifacts, tenant: str, name: str) -> ServedModel:
    """What a model's name stands for.

    Raises:
        NotFound: No such base model is served, or no such checkpoint exists, or it is another tenant's.
        InvalidInput: It is a checkpoint one cannot sample from.
    """
    base_model, checkpoint = name, None
    path = name
    if is_model_id(name):
        path = (await newest_checkpoint(common, artifacts, tenant, name)).path
    if name.startswith(PREFIX):
        path = await common.sql.run(artifacts.fine_tuned.sampler_path, name, tenant)
    if path.startswith((SCHEME, OTHER_SCHEME)):
        found = await _find_checkpoint(common, artifacts, tenant, name, path)
        if found.kind is CheckpointKind.EXTERNAL:
            raise InvalidInput("model", f"{name} is an export to take away; sample from a sampler checkpoint")
        refuse_whole_model(found, "model")
        base_model, checkpoint = found.config.base_model, found
    try:
        mesh = choose_mesh(await queue.meshes.all(), base_model, to_sample=True)
    except InvalidInput as error:
        raise NotFound(f"the model {base_model!r} is not served here; GET /v1/models lists what is") from error
    assert mesh.capabilities is not None, "a chosen mesh has said what it serves"
    return ServedModel(
        name=name, base_model=base_model, checkpoint=checkpoint, mesh=mesh.name, capabilities=mesh.capabilities
    )


async def _find_checkpoint(common: Common, artifacts: Artifacts, tenant: str, name: str, path: str) -> Checkpoint:
    try:
        place = str(parse_checkpoint_path(path, field="model"))
        return await common.sql.run(artifacts.checkpoints.find, place, tenant=tenant)
    except NotFound as error:
        if name == path:
            raise
        raise NotFound(f"the model {name!r} is gone: its checkpoint {path} was deleted") from error


async def newest_checkpoint(common: Common, artifacts: Artifacts, tenant: str, run: str) -> Checkpoint:
    """What a run of the tenant's has saved last.

    Raises:
        NotFound: There is no such run, or it is another tenant's, or it has saved nothing.
    """
    page = partial(artifacts.checkpoints.page, tenant, limit=1, offset=0, adapter_id=run, kinds=_SAMPLED)
    found, _ = await common.sql.run(page)
    if found:
        return found[0]
    await common.sql.run(partial(artifacts.adapters.find, run, tenant=tenant))
    raise NotFound(
        f"training run {run!r} has saved no checkpoint to sample from; save one"
        " (save_weights_for_sampler, or save in the Twinkle dialect), then ask again"
    )


def plan(
    body: DrawRequest,
    model: ServedModel,
    text_model: TextModel | None,
    tokens: list[int],
    *,
    topk: int,
    max_tokens: int | None,
    pictures: Sequence[PlacedPicture] = (),
) -> Drawing:
    """A request's drawing from one prompt; without ``max_tokens`` it may fill the context.

    Raises:
        InvalidInput: The prompt is empty or fills the context already, or stop texts come to a model without tokenizer.
    """
    room = model.capabilities.max_context_length - len(tokens)
    if not tokens:
        raise InvalidInput("prompt", "has no tokens")
    if room < 1:
        raise InvalidInput(
            "prompt", f"has {len(tokens)} tokens; {model.name} takes {len(tokens) + room}, output included"
        )
    if body.stop and text_model is None:
        raise InvalidInput("stop", f"the server has no tokenizer of {model.name} to find texts with; leave it out")
    return Drawing(
        tokens=tokens,
        pictures=tuple(pictures),
        num_samples=body.n or 1,
        max_tokens=min(max_tokens or room, room),
        topk=topk,
        stops=tuple(body.stop or ()),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
    )
