"""Caches of ModelScope and Hugging Face as their own clients leave them on the disk, filled with tiny models and data.

    world = make_hub_world(folder)
    subprocess.run([sys.executable, "train.py"], env={**os.environ, **world.environment})

ModelScope (modelscope 1.38 and newer, and two layouts of before), below ``MODELSCOPE_CACHE``::

    models/Qwen--Qwen3.5-4B/snapshots/master/...             snapshot_download
    models/Qwen/Qwen3___5-4B/...                             its older form; dots are written as ___
    datasets/swift--self-cognition/snapshots/master/...      dataset_snapshot_download
    datasets/swift/self-cognition/...                        its older form
    datasets/modelscope___gsm8k/main-<hash>/0.0.0/master/    MsDataset.load: Arrow files that `datasets` has built

Hugging Face, below ``HF_HOME``::

    hub/models--Qwen--Qwen3.5-4B/{refs/main, snapshots/<commit>/..., blobs/<hash>}   snapshot_download; links to blobs
    hub/datasets--openai--gsm8k/...                                                  the same
    datasets/openai___gsm8k/main/0.0.0/<commit>/                                     load_dataset
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import datasets
from datasets.naming import camelcase_to_snakecase

from harness.hub_data import DATA_SETS, DataFile, write_repository
from harness.hub_models import save_hub_model

Layout = Literal["snapshot", "older", "built"]

MODELS = {
    "Qwen/Qwen3.5-4B": "qwen3_5",
    "Qwen/Qwen3-4B": "qwen3",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3_moe",
}
"""What the documents name, and the class that is published under that name."""
MODEL_LAYOUTS: dict[str, Layout] = {"Qwen/Qwen2.5-7B-Instruct": "older"}
DATA_LAYOUTS: dict[str, Layout] = {
    "modelscope/gsm8k": "built",
    "hjh0119/shareAI-Llama3-DPO-zh-en-emoji": "built",
    "zouxuhong/Countdown-Tasks-3to4": "older",
}
"""Of what lies in ModelScope's cache other than by a snapshot."""
HUGGING_FACE_MODELS = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3-4B")
HUGGING_FACE_DATA = {"openai/gsm8k": "modelscope/gsm8k"}
COMMIT = hashlib.sha1(b"the commit that main points to").hexdigest()
NOBODY_LISTENS = "http://127.0.0.1:9"


@dataclass(frozen=True)
class HubWorld:
    """The caches of both hubs below one folder, and what repositories look like before they are placed."""

    root: Path

    @property
    def modelscope(self) -> Path:
        """``MODELSCOPE_CACHE``."""
        return self.root / "modelscope"

    @property
    def hugging_face(self) -> Path:
        """``HF_HOME``."""
        return self.root / "huggingface"

    @property
    def environment(self) -> dict[str, str]:
        """To use the caches, and to fail at once where something looks for a server all the same."""
        return {
            "MODELSCOPE_CACHE": str(self.modelscope),
            "MODELSCOPE_HOME": str(self.root / "modelscope-home"),
            "MODELSCOPE_ENDPOINT": NOBODY_LISTENS,
            "HF_HOME": str(self.hugging_face),
            "HF_HUB_CACHE": str(self.hugging_face / "hub"),
            "HF_DATASETS_CACHE": str(self.hugging_face / "datasets"),
            "HF_HUB_OFFLINE": "1",
            "HF_ENDPOINT": NOBODY_LISTENS,
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def model(self, model_class: str) -> Path:
        """A folder with a tiny model of this class; made once."""
        folder = self.root / "repositories" / "models" / model_class
        if not folder.exists():
            save_hub_model(folder, model_class)
        return folder

    def data(self, data_id: str) -> Path:
        """A folder with the files of this data set; made once."""
        folder = self.root / "repositories" / "datasets" / data_id
        if not folder.exists():
            write_repository(folder, DATA_SETS[data_id])
        return folder

    def place_in_modelscope(
        self,
        repository: Path,
        repository_id: str,
        *,
        kind: Literal["models", "datasets"] = "models",
        layout: Layout = "snapshot",
        revision: str = "master",
    ) -> Path:
        """Copy a repository to where ModelScope's client would have put it; returns its folder in the cache."""
        owner, name = repository_id.split("/")
        if layout == "older":
            # Data sets kept their dots, models did not.
            folder = self.modelscope / kind / owner / (name.replace(".", "___") if kind == "models" else name)
        else:
            folder = self.modelscope / kind / f"{owner}--{name}" / "snapshots" / revision
        return _link_tree(repository, folder)

    def place_in_hugging_face(
        self,
        repository: Path,
        repository_id: str,
        *,
        kind: Literal["models", "datasets"] = "models",
        commit: str = COMMIT,
        reference: str = "main",
    ) -> Path:
        """Put a repository where `huggingface_hub` would: files are links to blobs, a branch is a file."""
        folder = self.hugging_face / "hub" / f"{kind}--{repository_id.replace('/', '--')}"
        snapshot = folder / "snapshots" / commit
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / reference).write_text(commit)
        for file in _files_of(repository):
            blob = folder / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            if not blob.exists():
                shutil.copyfile(file, blob)
            link = snapshot / file.relative_to(repository)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
        return snapshot

    def build_in_modelscope(self, data_id: str) -> Path:
        """What `MsDataset.load` leaves: no file of the repository, only what `datasets` made of it."""
        return self._build(data_id, data_id, self.modelscope / "datasets", version="master")

    def build_in_hugging_face(self, data_id: str, source_id: str) -> Path:
        """What `load_dataset` leaves; with the rows of a data set of ours."""
        return self._build(data_id, source_id, self.hugging_face / "datasets", version=COMMIT)

    def _build(self, data_id: str, source_id: str, cache: Path, *, version: str) -> Path:
        owner, name = data_id.split("/")
        files = DATA_SETS[source_id]
        folder = cache / f"{owner}___{camelcase_to_snakecase(name)}"
        for subset in dict.fromkeys(file.subset for file in files):
            built = self._build_subset(source_id, name, [file for file in files if file.subset == subset])
            # Hugging Face's own builders hash a subset's files only when the caller names them.
            config_id = built.parent.parent.name if version == "master" else subset
            place = folder / config_id / "0.0.0" / version
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(built, place)
        return folder

    def _build_subset(self, source_id: str, name: str, files: list[DataFile]) -> Path:
        """The folder that `datasets` makes of files of one subset: ``.../<subset>-<hash>/0.0.0/master``."""
        repository = self.data(source_id)
        packaged = "parquet" if files[0].path.endswith(".parquet") else "json"
        builder = datasets.load_dataset_builder(
            packaged,
            data_files={file.split: str(repository / file.path) for file in files},
            cache_dir=str(self.root / "built"),
        )
        named = type(builder)(
            cache_dir=str(self.root / "built"),
            dataset_name=name,
            config_name=files[0].subset,
            data_files=builder.config.data_files,
            hash="master",
        )
        named.download_and_prepare()
        return Path(named.cache_dir)


def make_hub_world(root: Path, *, models: tuple[str, ...] = tuple(MODELS)) -> HubWorld:
    """All that the documents' scripts ask for, in the caches of both hubs.

    Args:
        root: An empty folder.
        models: Which of the documents' models to make: a test that needs one need not wait for four.
    """
    world = HubWorld(root)
    for model_id in models:
        folder = world.model(MODELS[model_id])
        world.place_in_modelscope(folder, model_id, layout=MODEL_LAYOUTS.get(model_id, "snapshot"))
        if model_id in HUGGING_FACE_MODELS:
            world.place_in_hugging_face(folder, model_id)
    for data_id in DATA_SETS:
        layout = DATA_LAYOUTS.get(data_id, "snapshot")
        if layout == "built":
            world.build_in_modelscope(data_id)
        else:
            world.place_in_modelscope(world.data(data_id), data_id, kind="datasets", layout=layout)
    for data_id, source_id in HUGGING_FACE_DATA.items():
        world.place_in_hugging_face(world.data(source_id), data_id, kind="datasets")
        world.build_in_hugging_face(data_id, source_id)
    return world


def _files_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _link_tree(source: Path, target: Path) -> Path:
    """A copy whose files share their bytes: weights lie on the disk once."""
    shutil.copytree(source, target, copy_function=os.link)
    return target
