"""Adapters by the names that their sessions' clients call them, where a dialect has such names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import orjson

from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, InvalidInput, NotFound
from twinkle.core.ids import request_id_of
from twinkle.core.operation import Accepted, Unnumbered
from twinkle.storage.database import Database, Row, Transaction
from twinkle.storage.journal.forgotten import gone_lanes
from twinkle.storage.journal.lanes import accept_own, lock_lanes
from twinkle.storage.journal.records import NewAdapter

_RUN_ID = re.compile(r".+:train:[0-9]+", re.ASCII)
_WITH_SESSION = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-(.+)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class AdapterAddress:
    """Where the calls of an adapter go."""

    id: str
    mesh: str
    base_model: str


@dataclass(frozen=True, kw_only=True)
class AdapterName:
    """What a client calls an adapter: its name in a session, or its id as a run."""

    text: str
    session: str | None
    """The session the client works in, for a name that does not say one."""

    @property
    def is_run_id(self) -> bool:
        """Whether it is the id of a run, whatever the session."""
        return _RUN_ID.fullmatch(self.text) is not None

    @property
    def parts(self) -> tuple[str | None, str]:
        """The session and the name within it: both forms of it are understood, ``name`` and ``<session>-<name>``."""
        found = _WITH_SESSION.fullmatch(self.text)
        return (self.session, self.text) if found is None else (found[1], found[2])


class NamedAdapters:
    """Makes and finds them."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def open(self, adapter: NewAdapter, *, name: str, first: Unnumbered) -> Accepted:
        """Make the session's adapter of this name, with the session's next number as a part of its id.

        Doing it again answers the same for as long as nothing else was asked of the adapter, or where both requests
        have one key; the name of an adapter that was unloaded is free.

        Args:
            adapter: It, without an id.
            name: What its client calls it.
            first: Its first operation, without a lane.

        Raises:
            NotFound: There is no such session of the tenant's.
            InvalidInput: The session has an adapter of this name.
            Conflict: The key was used for another adapter of this name.
            LimitReached: The tenant has as many adapters as it may have.
        """
        with self._database.transaction() as transaction:
            session = transaction.execute(
                "SELECT id FROM session WHERE id = ? AND tenant = ? FOR UPDATE", (adapter.session, adapter.tenant)
            ).fetchone()
            if session is None:
                raise NotFound(f"no session {adapter.session!r}")
            earlier = self._answer_again(transaction, adapter.session, name, first)
            if earlier is not None:
                return earlier
            new = replace(adapter, id=next_id(transaction, adapter.session))
            new.insert(transaction)
            lane = lock_lanes(transaction, [new.id])[new.id]
            accepted = accept_own(transaction, lane, replace(first, lane=new.id).at(0), now=self._clock.now())
            transaction.execute(
                "INSERT INTO named_adapter (session, name, adapter) VALUES (?, ?, ?)", (new.session, name, new.id)
            )
            return accepted

    def has(self, adapter: NewAdapter, *, name: str, first: Unnumbered) -> bool:
        """Whether :meth:`open` would make no new adapter of this."""
        rows = self._database.read(
            "SELECT l.unload_seq, o.request_key FROM named_adapter n JOIN lane l ON l.id = n.adapter"
            " JOIN operation o ON o.lane = n.adapter AND o.seq = 0 WHERE n.session = ? AND n.name = ? AND l.tenant = ?",
            (adapter.session, name, adapter.tenant),
        )
        if not rows:
            return False
        is_same_key = first.request_key is not None and rows[0].request_key == first.request_key
        return is_same_key or rows[0].unload_seq is None

    def find(self, name: AdapterName, *, tenant: str) -> AdapterAddress:
        """Where the calls of one of the tenant's adapters go.

        Raises:
            NotFound: The tenant has no such adapter.
        """
        session, bare = name.parts
        if name.is_run_id:
            rows = self._database.read(
                "SELECT id, mesh, config FROM adapter WHERE id = ? AND tenant = ?", (name.text, tenant)
            )
        else:
            rows = self._database.read(
                "SELECT a.id, a.mesh, a.config FROM named_adapter n JOIN adapter a ON a.id = n.adapter"
                " WHERE n.session = ? AND n.name = ? AND a.tenant = ?",
                (session, bare, tenant),
            )
        if not rows:
            raise NotFound(
                f"no adapter {name.text!r} in session {session!r}; call add_adapter_to_model first, in the session"
                " (header X-Twinkle-Session-Id) that the other calls come in"
            )
        return _address_of(rows[0])

    def has_lane(self, lane: str, *, tenant: str) -> bool:
        """Whether the journal numbers the operations of this lane of the tenant's, as it does in this dialect."""
        return bool(
            self._database.read("SELECT id FROM lane WHERE id = ? AND tenant = ? AND arrival_numbered", (lane, tenant))
        )

    def was_accepted(self, adapter: str, request_key: str) -> bool:
        """Whether a call under this key is among those of an adapter."""
        wanted = "SELECT seq FROM operation WHERE lane = ? AND request_key = ?"
        return bool(self._database.read(wanted, (adapter, request_key)))

    def last_request(self, adapter: str) -> tuple[int, str | None]:
        """The number of the last operation that was accepted for an adapter, and its key."""
        rows = self._database.read(
            "SELECT l.max_seq, o.request_key FROM lane l LEFT JOIN operation o ON o.lane = l.id AND o.seq = l.max_seq"
            " WHERE l.id = ?",
            (adapter,),
        )
        return int(rows[0].max_seq), rows[0].request_key

    def name_of(self, adapter: str) -> str | None:
        """What the dialect calls an adapter, with its session; ``None`` for one without a name."""
        rows = self._database.read("SELECT session, name FROM named_adapter WHERE adapter = ?", (adapter,))
        return f"{rows[0].session}-{rows[0].name}" if rows else None

    def _answer_again(self, transaction: Transaction, session: str, name: str, first: Unnumbered) -> Accepted | None:
        row = transaction.execute(
            "SELECT n.adapter, l.mesh, l.max_seq, l.unload_seq, o.digest, o.request_key FROM named_adapter n"
            " JOIN lane l ON l.id = n.adapter JOIN operation o ON o.lane = n.adapter AND o.seq = 0"
            " WHERE n.session = ? AND n.name = ?",
            (session, name),
        ).fetchone()
        if row is None:
            return None
        is_same_key = first.request_key is not None and row.request_key == first.request_key
        is_same = row.digest == first.digest
        if is_same and (is_same_key or row.max_seq == 0):
            return Accepted(request_id=request_id_of(row.adapter, 0), mesh=row.mesh, is_new=False)
        if is_same_key:
            raise Conflict(f"the idempotency key {first.request_key!r} was used for another adapter named {name!r}")
        if row.unload_seq is None:
            raise InvalidInput(
                "adapter_name",
                f"the session has an adapter {name!r} already, the run {row.adapter}; take another name, or begin a"
                " session",
            )
        transaction.execute("DELETE FROM named_adapter WHERE session = ? AND name = ?", (session, name))
        return None


def next_id(transaction: Transaction, session: str) -> str:
    """An id that no adapter of a session has. The session is locked by whoever asks."""
    row = transaction.execute("SELECT COUNT(*) AS num_adapters FROM adapter WHERE session = ?", (session,)).fetchone()
    assert row is not None, "a count is a row"
    number = int(row.num_adapters)
    while _is_taken(transaction, f"{session}:train:{number}"):
        number += 1
    return f"{session}:train:{number}"


def _is_taken(transaction: Transaction, lane: str) -> bool:
    found = transaction.execute("SELECT id FROM lane WHERE id = ?", (lane,)).fetchone()
    return found is not None or lane in gone_lanes(transaction, [lane])


def _address_of(row: Row) -> AdapterAddress:
    return AdapterAddress(id=row.id, mesh=row.mesh, base_model=orjson.loads(row.config)["base_model"])
