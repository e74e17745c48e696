"""The embedded stack while it runs: started in order, watched, stopped in order."""

from __future__ import annotations

import asyncio
import signal
import time

import httpx

from twinkle.cli.console import say
from twinkle.cli.embedded.asked_meshes import AskedMeshes
from twinkle.cli.embedded.broker import answers
from twinkle.cli.embedded.home import logs_of
from twinkle.cli.embedded.replicas import Replicas
from twinkle.cli.embedded.stack import WORKER_PREFIX, MeshPlan, Stack, worker_spec
from twinkle.cli.embedded.supervisor import Child, Fall, Guard
from twinkle.core.clock import SystemClock
from twinkle.core.errors import ConfigError, TwinkleError
from twinkle.core.mesh import MeshAnnouncement
from twinkle.core.process.background import say_if_it_ends
from twinkle.core.settings import Settings
from twinkle.storage.database import Database
from twinkle.storage.journal.meshes import Meshes, MeshStatus
from twinkle.storage.journal.moves import Moves

HEALTH_PATH = "/api/v1/healthz"

_BROKER_TIMEOUT_S = 20.0
_ASK_EVERY_S = 0.1
_ASK_TIMEOUT_S = 2.0
_REMIND_EVERY_S = 30.0
_UNSPECIFIED_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Service:
    """The running stack."""

    def __init__(
        self, settings: Settings, meshes: list[MeshPlan], stack: Stack, guard: Guard, *, started: float
    ) -> None:
        """Start nothing yet. ``started`` is the monotonic time from which readiness is counted."""
        self._settings = settings
        self._model_names = {mesh.name: mesh.model_name for mesh in meshes}
        self._announced = {
            mesh.name: MeshAnnouncement.of(
                model_name=mesh.model_name,
                engine=mesh.own.get("engine", settings.engine),
                serves=mesh.own.get("serves", settings.serves),
            )
            for mesh in meshes
        }
        self._started = started
        self._api = Child(stack.api, guard, say, self._on_fall)
        workers = {spec.name: Child(spec, guard, say, self._on_fall) for spec in stack.workers}
        self._started_workers = list(workers.values())
        self._broker = None if stack.broker is None else Child(stack.broker, guard, say, self._on_fall)
        database = Database(settings.resolved_database_url)
        clock = SystemClock()
        self._meshes, moves = Meshes(database, clock), Moves(database, clock)
        self._asked = AskedMeshes(
            settings,
            self._meshes,
            moves,
            replicas=Replicas(settings, meshes, self._meshes, moves, clock),
            started={mesh.name: workers.pop(f"{WORKER_PREFIX}{mesh.name}") for mesh in meshes},
            make_child=lambda mesh: Child(worker_spec(settings, mesh), guard, say, self._on_fall),
        )
        self._others = list(workers.values())
        self._is_ready = False
        self._following: asyncio.Task[None] | None = None
        self._refusal: Fall | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Start, watch, stop. No process is left behind, whatever happens in between.

        Raises:
            ConfigError: The broker does not come up, or a child refuses its settings before the stack was ready.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(number, self._on_signal)
        start = asyncio.create_task(self._start())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()
                await stop
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            await self._stop_all()
        if self._refusal is not None:
            raise ConfigError(str(self._refusal))

    async def _start(self) -> None:
        earlier = {mesh.name: mesh.epoch for mesh in await asyncio.to_thread(self._meshes.all)}
        if self._broker is not None:
            await self._broker.start()
            await self._until_broker_answers()
        # Before the API: one mesh may be ready long before another, and who asks for that one is to wait.
        for name, announcement in self._announced.items():
            await asyncio.to_thread(self._meshes.announce, name, announcement)
        for child in (self._api, *self._started_workers):
            await child.start()
        await self._until_api_answers()
        say(f"the API answers after {self._elapsed_s():.1f} s")
        await self._until_meshes_serve(earlier)
        self._is_ready = True
        self._following = asyncio.create_task(self._asked.follow(self._hurry), name="meshes")
        say_if_it_ends(self._following)
        say(f"ready in {self._elapsed_s():.1f} s; Ctrl-C stops")

    async def _until_broker_answers(self) -> None:
        url = self._settings.redis_url.get_secret_value()
        deadline = time.monotonic() + _BROKER_TIMEOUT_S
        while not await asyncio.to_thread(answers, url):
            if time.monotonic() > deadline:
                raise ConfigError(f"the broker did not answer within {_BROKER_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_ASK_EVERY_S / 4)

    async def _until_api_answers(self) -> None:
        host = _UNSPECIFIED_HOSTS.get(self._settings.host, self._settings.host)
        netloc = f"[{host}]" if ":" in host else host
        url = f"http://{netloc}:{self._settings.port}{HEALTH_PATH}"
        async with httpx.AsyncClient(timeout=_ASK_TIMEOUT_S, trust_env=False) as client:
            while not await _is_healthy(client, url):  # noqa: ASYNC110 - another process has no event to wait for
                await asyncio.sleep(_ASK_EVERY_S)

    async def _until_meshes_serve(self, earlier: dict[str, int]) -> None:
        """Wait until each mesh has a worker of this run that said what it can do."""
        waiting = set(self._model_names)
        reminder = time.monotonic() + _REMIND_EVERY_S
        while waiting:
            if time.monotonic() > reminder:
                reminder += _REMIND_EVERY_S
                logs = logs_of(self._settings.home)
                say(f"no worker yet for {', '.join(sorted(waiting))} after {self._elapsed_s():.0f} s; see {logs}")
                # Its worker may not have come so far as to announce itself; one that never does is not waited for.
                for name in waiting if self._elapsed_s() < self._settings.start_timeout_s else ():
                    await asyncio.to_thread(self._meshes.renew_announcement, name, self._announced[name])
            for mesh in await asyncio.to_thread(self._meshes.all):
                if mesh.name in waiting and _serves(mesh, since_epoch=earlier.get(mesh.name, 0)):
                    waiting.discard(mesh.name)
                    say(f"mesh {mesh.name} serves {self._model_names[mesh.name]} ({mesh.num_adapters} adapters)")
            await asyncio.sleep(_ASK_EVERY_S)

    async def _stop_all(self) -> None:
        """The API first, so that nothing new is accepted; then who works; the broker last."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._api.stop(self._hurry)
        workers = [*self._asked.workers.values(), *self._others]
        await asyncio.gather(*(child.stop(self._hurry) for child in workers))
        await asyncio.to_thread(self._withdraw)
        if self._broker is not None:
            await self._broker.stop(self._hurry)
        say(f"stopped after {self._elapsed_s():.0f} s")

    def _withdraw(self) -> None:
        """Of what no worker was started any more; the others have done so."""
        try:
            for name in self._announced:
                self._meshes.withdraw(name)
        except TwinkleError as error:
            say(f"the journal did not hear that no mesh starts any more: {error.message}")

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
            say("not waiting any longer")
        else:
            self._stop.set()
            say("stopping: running operations finish or go back to the journal; again to not wait for them")

    def _on_fall(self, fall: Fall) -> None:
        """A child that refuses its settings will not change its mind: a service without it ends, or never begins.

        Once it runs, a mesh may fall out alone: the others go on, and so does whoever reads results.
        """
        if not fall.is_refusal or self._refusal is not None:
            return
        if self._is_ready and fall.name.startswith(WORKER_PREFIX):
            say(f"{fall.name.removeprefix(WORKER_PREFIX)} is a mesh without a worker now; mend it and start serve anew")
            return
        self._refusal = fall
        self._stop.set()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started


async def _is_healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _serves(mesh: MeshStatus, *, since_epoch: int) -> bool:
    return mesh.alive and mesh.epoch > since_epoch and mesh.capabilities is not None
