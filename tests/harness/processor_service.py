"""The worker of processors beside an app under test, in this process; its rows are in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from twinkle.client.facade import LoopThread
from twinkle.core.clock import SystemClock
from twinkle.core.settings import Settings
from twinkle.storage.blobs import open_blob_store
from twinkle.storage.stores import Stores
from twinkle.tasks.app import make_app
from twinkle.workers.processors.serving import serving_processors


@contextmanager
def processors_of(settings: Settings) -> Iterator[None]:
    """Serve processors while the block runs."""
    clock = SystemClock()
    stores = Stores.at(settings.resolved_database_url, clock, limits=settings.tenant_limits)
    loop, stack = LoopThread("processors"), AsyncExitStack()
    serving = serving_processors(
        settings, stores, open_blob_store(settings.resolved_object_store), app=make_app(settings), clock=clock
    )
    loop.run(stack.enter_async_context(serving))
    try:
        yield
    finally:
        loop.run(stack.aclose())
        loop.stop()
        stores.close()
