"""What readiness tells of the object store, and tokens whose end is odd."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import jwt
import pytest

from harness.clock import HandClock
from harness.polling import wait_for
from twinkle.core.errors import InvalidToken
from twinkle.server.access.auth import Tokens
from twinkle.server.access.signing import Signer
from twinkle.server.readiness import ObjectBoard
from twinkle.server.threads import Threads
from twinkle.storage.blobs import FolderStore

if TYPE_CHECKING:
    from conftest import ServeApi


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


def test_what_needs_no_key_is_asked_of_the_journal_once_and_the_document_is_written_once(
    serve_api: ServeApi, make_database_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    most = 6

    def counted(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            asked.append(name)
            if name == "document":
                wait_for(lambda: api.server.door.num_open >= most, what="everybody to have asked")
            return ask(*arguments, **options)

        return count

    with serve_api(make_database_url("sqlite"), clock=HandClock()) as api, ThreadPoolExecutor(most) as many:
        for name, part, method in (
            ("meshes", api.stores.meshes, "all"),
            ("queues", api.stores.queues, "stalls"),
            ("document", api.app, "openapi"),
        ):
            owner = part if name == "document" else type(part)
            monkeypatch.setattr(owner, method, counted(name, getattr(owner, method)))
        documents = list(many.map(lambda _: httpx.get(f"{api.url}/openapi.json", timeout=60), range(most)))
        answers = [httpx.get(f"{api.url}/api/v1/{path}") for path in ("livez", "readyz") for _ in range(10)]

    assert {answer.status_code for answer in documents} == {200} and len({one.content for one in documents}) == 1
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert sorted(asked) == ["document", "meshes", "queues"]


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
