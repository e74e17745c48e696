"""Processes that a test has stopped: what they hold then."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from harness.polling import wait_until
from harness.served import Served

# All that it does is to ask for the lock, which is when the signal finds it.
_WRITER = """
import sqlite3, sys, threading, time

def write():
    journal = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
    while True:
        try:
            journal.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            continue
        journal.execute("INSERT INTO entry VALUES (1)")
        journal.execute("COMMIT")
        time.sleep(0.005)

journal = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
journal.executescript("PRAGMA journal_mode=WAL; CREATE TABLE entry (number INTEGER)")
for _ in range(4):
    threading.Thread(target=write).start()
"""


def test_whoever_was_made_to_stand_still_never_has_the_journals_lock(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    served = Served(tmp_path, model="null")
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(file)])
    try:
        _wait_for_more(file, than=0)
        for _ in range(40):
            with served.standing_still(writer.pid), closing(_journal(file)) as journal:
                journal.execute("BEGIN IMMEDIATE")
                journal.execute("ROLLBACK")
                num_before = _num_entries(file)
            _wait_for_more(file, than=num_before)
    finally:
        writer.kill()
        writer.wait()


def _wait_for_more(file: Path, *, than: int) -> None:
    wait_until(lambda: _num_entries(file) > than, what="an entry of the writer")


def _journal(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(file, timeout=1, isolation_level=None)


def _num_entries(file: Path) -> int:
    with closing(_journal(file)) as journal:
        try:
            return int(journal.execute("SELECT COUNT(*) FROM entry").fetchone()[0])
        except sqlite3.OperationalError:
            return 0
