"""What the names of checkpoints mean: a content is published under a name, and ends when the name gets another.

Both happen under the row's lock, so whoever is bound to a content either still finds it or never will again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from twinkle.core.adapter import Checkpoint
from twinkle.storage.database import Row, Transaction, placeholders
from twinkle.storage.tenants.audit import insert_entry
from twinkle.storage.upkeep.waste import doom


def publish_checkpoint(transaction: Transaction, checkpoint: Checkpoint, *, now: float) -> None:
    """Let a name mean what was saved under it.

    The same content as before keeps its id, and whoever may read it goes on. Another one is private, has an id of its
    own, and ends all that was bound to its predecessor; when that was public, the owner's audit log says so.
    """
    before = transaction.execute(
        "SELECT content, files, config, files_group, generation, public, expires_at FROM checkpoint WHERE path = ?"
        " FOR UPDATE",
        (checkpoint.path,),
    ).fetchone()
    kept = before if before is not None and _is_same(before, checkpoint, now) else None
    if before is not None:
        _give_up_files(transaction, before, checkpoint, now=now)
        if before.public and kept is None and not _is_over(before, now):
            details = {"tinker_path": checkpoint.path, "training_run": checkpoint.adapter, "reason": "overwritten"}
            insert_entry(transaction, checkpoint.tenant, "checkpoint_unpublish", details, now=now)
    files = json.dumps({name: file.model_dump() for name, file in checkpoint.files.items()})
    transaction.execute(
        "INSERT INTO checkpoint (path, tenant, adapter, kind, name, seq, config, files, size_bytes, user_metadata,"
        " public, listed, created_at, expires_at, files_group, content, generation)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE SET"
        " seq = excluded.seq, config = excluded.config, files = excluded.files, size_bytes = excluded.size_bytes,"
        " user_metadata = excluded.user_metadata, public = excluded.public, created_at = excluded.created_at,"
        " expires_at = excluded.expires_at, files_group = excluded.files_group, content = excluded.content,"
        " generation = excluded.generation, copied_from = NULL",
        (
            checkpoint.path,
            checkpoint.tenant,
            checkpoint.adapter,
            checkpoint.kind.value,
            checkpoint.name,
            checkpoint.seq,
            checkpoint.config.model_dump_json(),
            files,
            checkpoint.size_bytes,
            None if checkpoint.user_metadata is None else json.dumps(checkpoint.user_metadata),
            kept is not None and bool(kept.public),
            checkpoint.listed,
            now,
            checkpoint.expires_at,
            # Saved again in the same files, it still shares them with its copies.
            kept.files_group if kept is not None and kept.files == files else None,
            checkpoint.content if kept is None else kept.content,
            0 if kept is None else kept.generation,
        ),
    )


def remove_checkpoints(
    transaction: Transaction, where: str, parameters: Sequence[object], *, now: float
) -> tuple[int, list[str]]:
    """Delete the rows of checkpoints, give up their files, and keep in mind what they took up.

    Returns:
        How many there were, and the keys of those files that nothing refers to any more.
    """
    rows = transaction.execute(
        f"DELETE FROM checkpoint WHERE {where} RETURNING files_group, files, path, tenant, adapter, size_bytes,"
        " created_at, config",
        parameters,
    ).fetchall()
    for row in rows:
        transaction.execute(
            "INSERT INTO past_checkpoint (path, tenant, adapter, session, base_model, size_bytes, created_at, ended_at)"
            " SELECT ?, ?, id, session, ?, ?, CAST(? AS DOUBLE PRECISION), CAST(? AS DOUBLE PRECISION) FROM adapter"
            " WHERE id = ?",
            (
                row.path,
                row.tenant,
                json.loads(row.config)["base_model"],
                row.size_bytes,
                row.created_at,
                now,
                row.adapter,
            ),
        )
    groups = sorted({row.files_group for row in rows if row.files_group is not None})
    shared = transaction.execute(
        f"SELECT DISTINCT files_group FROM checkpoint WHERE files_group IN ({placeholders(groups)})", groups
    ).fetchall()
    kept = {row.files_group for row in shared}
    files = {key for row in rows if row.files_group not in kept for key in _keys_of(row)}
    doom(transaction, files, now=now)
    return len(rows), sorted(files)


def _is_same(before: Row, checkpoint: Checkpoint, now: float) -> bool:
    """Whether a save is of what its name means already. One whose time is over is not there any more."""
    if _is_over(before, now) or before.config != checkpoint.config.model_dump_json():
        return False
    digests = {name: file["sha256"] for name, file in json.loads(before.files).items()}
    return digests == {name: file.sha256 for name, file in checkpoint.files.items()}


def _is_over(row: Row, now: float) -> bool:
    return row.expires_at is not None and row.expires_at <= now


def _give_up_files(transaction: Transaction, before: Row, checkpoint: Checkpoint, *, now: float) -> None:
    """Give up the files of what had this name, but for those that a copy or the new content has too."""
    if before.files_group is not None:
        shared = transaction.execute(
            "SELECT path FROM checkpoint WHERE files_group = ? AND path <> ? LIMIT 1",
            (before.files_group, checkpoint.path),
        ).fetchone()
        if shared is not None:
            return
    doom(transaction, set(_keys_of(before)) - {file.key for file in checkpoint.files.values()}, now=now)


def _keys_of(row: Row) -> Iterable[str]:
    return [file["key"] for file in json.loads(row.files).values()]
