"""Base models with tokenizers, and adapters for them, as exports are made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from sqlmodel import Session
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from harness.families import FAMILIES, RELEASED, stir
from harness.journal import MESH
from harness.models import EXAMPLES
from twinkle.checkpoint_engine.peft import export_adapter
from twinkle.core.adapter import AdapterConfig, Checkpoint, CheckpointKind, StoredFile
from twinkle.core.ids import new_id
from twinkle.core.lease import ProcessIdentity
from twinkle.core.mesh import MeshCapabilities
from twinkle.hub.tiny import train_tokenizer
from twinkle.module.adapter import AdapterLayout, LoraAdapter, LoraConfig
from twinkle.module.lora import shapes_of
from twinkle.module.targets import beside_experts
from twinkle.storage.blobs import CHECKPOINTS, BlobStore
from twinkle.storage.journal.records import NewAdapter, Records
from twinkle.storage.sql_engine import sql_engine
from twinkle.storage.stores import Stores
from twinkle.storage.tables import SessionRow
from twinkle.workers.jobs.export.requests import ExportForm, ExportRequest
from twinkle.workers.jobs.export.skeleton import open_skeleton


def make_base(folder: Path, config: transformers.PretrainedConfig, *, dtype: torch.dtype = torch.float32) -> Path:
    """A model of a config with random weights, by the class that is published."""
    is_released = type(config) in {type(make()) for make in RELEASED.values()}
    loader: Any = transformers.AutoModelForImageTextToText if is_released else transformers.AutoModelForCausalLM
    torch.manual_seed(7)
    model = loader.from_config(config)
    stir(model)
    model.to(dtype).save_pretrained(folder)
    return folder


def make_family(folder: Path, family: str, *, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny model of a family that the engine serves; ``released:`` before it: of the class with a tower."""
    name = family.removeprefix("released:")
    return make_base(folder, (FAMILIES if name == family else RELEASED)[name](), dtype=dtype)


def add_tokenizer(folder: Path, *, like_llama3: bool = False) -> None:
    """The tiny models' tokenizer, trained on the shipped text; or one that splits text as Llama 3's does."""
    texts = [path.read_text() for path in sorted(EXAMPLES.glob("*.jsonl"))]
    train_tokenizer(texts, vocab_size=307, context=512).save_pretrained(folder)
    if like_llama3:
        file = folder / "tokenizer.json"
        written = json.loads(file.read_text())
        pattern = written["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        pattern["Regex"] = pattern["Regex"].replace(r"|\p{N}|", r"|\p{N}{1,3}|")
        written["model"]["ignore_merges"] = True
        file.write_text(json.dumps(written))


def add_pieces(folder: Path) -> None:
    """A tokenizer like Llama 2's, of 500 pieces: SentencePiece's pairs, and bytes for what is no piece."""
    texts = [path.read_text() for path in sorted(EXAMPLES.glob("*.jsonl"))]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    lines = [word for text in texts for line in text.splitlines()[:200] for word in line.split(" ")]
    tokenizer.train_from_iterator(lines, BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    written = json.loads(tokenizer.to_str())
    vocabulary = written["model"]["vocab"]
    made = [first + second for first, second in written["model"]["merges"]]
    # All pairs that make a piece, one piece behind the other, as transformers reads them out of SentencePiece's files.
    written["model"]["merges"] = [
        [piece[:at], piece[at:]]
        for piece in made
        for at in range(1, len(piece))
        if piece[:at] in vocabulary and piece[at:] in vocabulary
    ]
    # Bytes are pieces as others are; only what begins and ends is special.
    written["added_tokens"] = [token for token in written["added_tokens"] if token["id"] < 3]
    written["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)


def make_adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """An adapter for a base model, as the engine writes it, every update of some size."""
    targets = open_skeleton(base).targets
    config = LoraConfig(**{"rank": 4, "seed": 3, **settings})
    layout = AdapterLayout(tuple(shapes_of(targets, config)), beside_experts=beside_experts(targets))
    adapter = LoraAdapter(config, layout, device=torch.device("cpu"), compute_dtype=torch.float32, trainable=False)
    fill(adapter)
    return write(folder, export_adapter(adapter, str(base)))


def fill(adapter: LoraAdapter) -> None:
    """Give an adapter random weights."""
    adapter.initialize()
    generator = torch.Generator().manual_seed(1)
    for pair in adapter.views.values():
        pair.b.copy_(0.02 * torch.randn(pair.b.shape, generator=generator))
    adapter.publish()


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """Put files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def split_in_two(base: Path) -> None:
    """Cut a model's file into two shards with an index."""
    whole = base / "model.safetensors"
    with_names = load_file(whole)
    names = sorted(with_names)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    weight_map = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: with_names[name] for name in half}, base / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(half, file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    whole.unlink()


def request_for(folder: Path, base: Path, adapter: Path, forms: Iterable[ExportForm], **settings: Any) -> ExportRequest:
    """An export into a folder."""
    given = {"name": "tiny", "memory_bytes": 2**30, "compares_logits": True, **settings}
    return ExportRequest(base=str(base), adapter=str(adapter), folder=str(folder), forms=tuple(forms), **given)


def publish_mesh(stores: Stores, base_model: str, folder: Path) -> None:
    """Let a mesh serve a base model whose files are in a folder."""
    lease = stores.meshes.acquire(MESH, ProcessIdentity.current(), lease_s=3600.0)
    assert lease is not None
    stores.meshes.publish(
        lease,
        MeshCapabilities(
            base_model=base_model,
            architecture="",
            vocab_size=307,
            max_context_length=512,
            max_rank=64,
            device="cpu",
            determinism="none",
            tokenizer_path=str(folder),
        ),
    )


def save_checkpoint(
    stores: Stores,
    blobs: BlobStore,
    tenant: str,
    base_model: str,
    adapter: Path,
    *,
    rank: int = 4,
    created_at: float = 0.0,
) -> str:
    """A checkpoint of a tenant's with an adapter's files; its path."""
    run = new_id()
    config = AdapterConfig(base_model=base_model, rank=4, seed=3)
    with Session(sql_engine(stores.database.url)) as session:
        session.add(SessionRow(id=f"session-{run}", tenant=tenant, tags="[]", created_at=0.0, heartbeat_at=0.0))
        session.commit()
    stores.journal.open_lane(
        NewAdapter(
            id=run,
            tenant=tenant,
            session=f"session-{run}",
            mesh=MESH,
            config=config,
            optimizer={"type": "adamw"},
            user_metadata=None,
            created_at=0.0,
        )
    )
    files = {}
    for path in adapter.iterdir():
        data = path.read_bytes()
        key = f"{CHECKPOINTS}2026-01-01/{run}/sampler_weights/best/7/{new_id()}/{path.name}"
        blobs.put(key, data)
        files[path.name] = StoredFile(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    checkpoint = Checkpoint(
        path=f"tinker://{run}/sampler_weights/best",
        tenant=tenant,
        adapter=run,
        kind=CheckpointKind.SAMPLER,
        name="best",
        seq=7,
        config=config.model_copy(update={"rank": rank}),
        files=files,
        created_at=created_at,
    )
    with stores.database.transaction() as transaction:
        Records(checkpoints=[checkpoint]).insert(transaction, created_at)
    return checkpoint.path
