"""A service under faults: something breaks while tenants work, then the history is judged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from harness.crashes import Crashes
from harness.history import History, Verdict, judge, read_rows
from harness.served import Served
from harness.tenant import Tenant, burst

READ_AGAIN = 40
MAX_OPEN = 8
"""Nameless weights of a session on the real model: few, for what becomes of more."""


@dataclass
class Struck:
    """The service, its crash points, and the name of its model."""

    served: Served
    crashes: Crashes
    model: str = "null"

    @cached_property
    def key(self) -> str:
        return self.served.create_key("struck")

    def tenant(self, history: History) -> Tenant:
        return Tenant(self.served.url, self.key, history)

    def work_through(self, fault: Callable[[], None], *, runs: int = 2, steps: int = 6) -> Verdict:
        """Let tenants work while ``fault`` happens, to the end of both; the verdict on all they saw."""
        history = History()
        tenant = self.tenant(history)
        errors: list[BaseException] = []

        def break_it() -> None:
            try:
                fault()
            except BaseException as error:  # noqa: BLE001 - told in the test's own thread
                errors.append(error)

        breaker = threading.Thread(target=break_it)
        breaker.start()
        while True:
            burst(tenant, runs=runs, steps=steps)
            if not breaker.is_alive():
                break
        breaker.join()
        if errors:
            raise errors[0]
        return self.verdict(tenant, history)

    def verdict(self, tenant: Tenant, history: History) -> Verdict:
        """Judge what the tenant saw, after it has asked for some outcomes once more."""
        accepted = [event for event in history.events if event.kind == "accepted"]
        for event in accepted[-READ_AGAIN:]:
            tenant.collect(event.lane, event.seq, event.value.decode())
        tenant.close()
        lanes = {event.lane for event in history.events}
        rows = [row for row in read_rows(self.served.query) if row.lane in lanes]
        return judge(history.events, rows, lambda key: (self.served.home / "objects" / key).read_bytes())
