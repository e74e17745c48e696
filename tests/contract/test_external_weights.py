"""What a worker does for a checkpoint that is to be taken away."""

from __future__ import annotations

import importlib.util
import json

import pytest

from harness.clock import HandClock
from harness.journal import Bench, digest
from harness.worker import WorkerRig
from twinkle.core.errors import InvalidInput
from twinkle.core.operation import OperationKind, Payload, Submission
from twinkle.storage.blobs import FolderStore
from twinkle.workers.adapters.artifacts import encrypt_files

RUN = "session-t0:train:0"
HAS_AGE = importlib.util.find_spec("pyrage") is not None


@pytest.fixture
def rig(bench: Bench, clock: HandClock, tmp_path):  # type: ignore[no-untyped-def]
    rig = WorkerRig("a", stores=bench.stores, blobs=FolderStore(tmp_path / "o"), clock=clock)
    yield rig
    rig.bury()


def _save(seq: int, **fields: object) -> Submission:
    body = json.dumps({"model_id": RUN, "seq_id": seq, **fields}).encode()
    return Submission(
        tenant="t0",
        lane=RUN,
        seq=seq,
        kind=OperationKind.SAVE_WEIGHTS_EXTERNAL,
        digest=digest(body),
        payload=Payload(inline=body),
    )


def test_it_holds_the_weights_without_the_optimizer_and_says_how_large_it_is(bench: Bench, rig: WorkerRig) -> None:
    bench.adapter(RUN)
    bench.append(_save(1, path="out", ttl_seconds=60), _save(2, path="out"))

    rig.drain()

    checkpoint = bench.checkpoints.find(f"tinker://{RUN}/external_weights/out")
    first, again = bench.status(RUN, 1), bench.status(RUN, 2)
    assert first.result is not None and first.result.inline is not None
    assert again.result is not None and again.result.inline == first.result.inline
    answer = json.loads(first.result.inline)
    assert (answer["path"], answer["size_bytes"]) == (checkpoint.path, checkpoint.size_bytes)
    assert checkpoint.expires_at is not None and checkpoint.listed


@pytest.mark.skipif(HAS_AGE, reason="pyrage is installed")
def test_without_the_package_encryption_is_refused_by_name(bench: Bench, rig: WorkerRig) -> None:
    bench.adapter(RUN)
    bench.append(_save(1, path="out", age_encryption_recipients=["age1qqq"]), _save(2, path="plain"))

    rig.drain()

    failure = bench.status(RUN, 1).failure
    assert failure is not None
    assert (failure.category, failure.code) == ("user", "invalid_input")
    assert "pyrage is not installed" in failure.message
    assert bench.status(RUN, 2).failure is None


@pytest.mark.skipif(not HAS_AGE, reason="pyrage is not installed")
def test_files_are_encrypted_to_each_recipient() -> None:
    pyrage = pytest.importorskip("pyrage")
    identities = [pyrage.x25519.Identity.generate() for _ in range(2)]

    files = encrypt_files({"a.bin": b"weights"}, [str(identity.to_public()) for identity in identities])

    assert list(files) == ["a.bin.age"]
    for identity in identities:
        assert pyrage.decrypt(files["a.bin.age"], [identity]) == b"weights"
    with pytest.raises(InvalidInput, match="neither an age1"):
        encrypt_files({"a": b""}, ["nonsense"])
