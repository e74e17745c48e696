"""``twinkle orphans``: what lies in the object store and in no row of the journal."""

from __future__ import annotations

import json
from collections import Counter

from twinkle.cli.console import say
from twinkle.cli.operator.journal import opened_journal
from twinkle.cli.table import print_table
from twinkle.core.settings import Settings
from twinkle.storage.blobs import open_blob_store


def show_orphans(settings: Settings, *, older_than_days: int, delete: bool, as_json: bool) -> None:
    """Count what nothing refers to, by kind; with ``delete``, hand it to housekeeping."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    with opened_journal(settings) as stores:
        for page in stores.waste.orphans(
            open_blob_store(settings.resolved_object_store), older_than_days=older_than_days
        ):
            for blob in page:
                kind = blob.key.partition("/")[0]
                counts[kind] += 1
                sizes[kind] += blob.size_bytes
            if delete:
                stores.waste.give_up(page)
        if delete and counts:
            stores.audit.note(None, "orphans_delete", blobs=str(counts.total()), bytes=str(sizes.total()))
    if as_json:
        say(json.dumps([{"kind": kind, "blobs": counts[kind], "bytes": sizes[kind]} for kind in sorted(counts)]))
    elif counts:
        print_table(
            ("kind", "blobs", "bytes"), [(kind, str(counts[kind]), str(sizes[kind])) for kind in sorted(counts)]
        )
        say("housekeeping deletes them in a while" if delete else "delete them with --delete")
    else:
        say("nothing in the object store is without a row")
