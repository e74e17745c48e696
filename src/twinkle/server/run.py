"""The API as a process: uvicorn, set up for thousands of held polls and a quick, clean end."""

from __future__ import annotations

import resource
import socket

import structlog
import uvicorn
from fastapi import FastAPI

from twinkle.core.clock import SystemClock
from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.server.access.joining import fingerprint_of
from twinkle.server.access.signing import Signer, secret_of
from twinkle.server.app import create_app, prepare_database
from twinkle.server.connections.doors import Door, DoorConfig, DoorLimits, GuardedProtocol
from twinkle.server.connections.free_memory import keep_out_of_collections
from twinkle.server.openapi import Api
from twinkle.server.state import state_of
from twinkle.storage.database import Database
from twinkle.storage.tenants.deployment import Deployment
from twinkle.tasks.surroundings import check_surroundings, refuse_taken

_KEEP_ALIVE_S = 75
_GRACEFUL_SHUTDOWN_S = 5
_BACKLOG = 4096

_log = structlog.get_logger()


class ApiServer(uvicorn.Server):
    """A server that lets its held polls go before it waits for the open requests to end."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        super().__init__(
            DoorConfig(
                app,
                host=settings.host,
                port=settings.port,
                loop="uvloop",
                http=GuardedProtocol,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_S,
            )
        )
        self._app = app
        assert isinstance(app, Api) and isinstance(self.config, DoorConfig)
        self.door = Door(DoorLimits.of(settings), app.freed)
        self.config.door = self.door

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the held polls, then end as uvicorn does."""
        server = state_of(self._app)
        server.queue.futures.release()
        server.queue.lane_polls.release()
        server.jobs.polls.release()
        await super().shutdown(sockets)


def serve_api(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Blocks.

    Raises:
        ConfigError: A setting is wrong, or the app could not start with it.
        StorageUnavailable: The database does not answer; worth another start.
    """
    _allow_many_sockets()
    app = create_app(settings)
    # Also done as the app starts; here a failure is one clear line instead of a traceback in the log.
    prepare_database(settings)
    check_surroundings(settings)
    deployment = Deployment(Database(settings.resolved_database_url), SystemClock())
    deployment.join(fingerprint_of(Signer(secret_of(settings))))
    refuse_taken(settings.host, settings.port, "--host or --port")
    server = ApiServer(app, settings)
    keep_out_of_collections()
    server.run()
    if not server.started:
        raise ConfigError("the API did not start; the log says why")


def _allow_many_sockets() -> None:
    """Every held poll is an open socket, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _log.debug("api.open_files", before=soft, now=hard)
