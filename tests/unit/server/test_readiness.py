"""What readiness tells of the object store, and tokens whose end is odd."""

from __future__ import annotations

import shutil
from pathlib import Path

import jwt
import pytest

from harness.clock import HandClock
from twinkle.core.errors import InvalidToken
from twinkle.server.auth import Tokens
from twinkle.server.readiness import ObjectBoard
from twinkle.server.signing import Signer
from twinkle.server.threads import Threads
from twinkle.storage.blobs import FolderStore


async def test_an_object_store_that_goes_away_is_told_and_one_that_comes_back(tmp_path: Path) -> None:
    clock, threads = HandClock(), Threads("objects", 1)
    board = ObjectBoard(FolderStore(tmp_path / "objects"), clock, threads)

    there = await board.answers()
    shutil.rmtree(tmp_path / "objects")
    soon = await board.answers()
    clock.move(6)
    away = await board.answers()
    (tmp_path / "objects").mkdir()
    clock.move(6)
    back = await board.answers()
    threads.stop()

    # Whoever asks again within seconds is told what was seen then.
    assert (there, soon, away, back) == (True, True, False, True)


@pytest.mark.parametrize(
    "end", ["soon", float("nan"), float("inf"), float("-inf"), [], {}, None, 0, -1, 1e30], ids=repr
)
def test_a_token_whose_end_is_odd_is_a_token_that_is_refused(end: object) -> None:
    signer, clock = Signer(b"secret"), HandClock()
    tokens = Tokens(signer, clock, lifetime_s=60)
    odd = jwt.encode({"sub": "tml:apikey:x", "exp": end}, signer.key_for("access tokens"), "HS256")

    if end == 1e30:
        assert tokens.key_id_of(odd) == "x"
    else:
        with pytest.raises(InvalidToken):
            tokens.key_id_of(odd)
