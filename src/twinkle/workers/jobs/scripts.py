"""Scripts of tenants whom the operator allows it: by another user, within limits, with a key that ends with them.

This is no sandbox: a script reaches the network and whatever its user may read. See docs/jobs.md.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.job import JobFailed
from twinkle.core.process.background import say_if_it_ends
from twinkle.core.settings import SAME_USER, Settings
from twinkle.jobs.script_tools import RunningScript, ScriptRequest
from twinkle.storage.tenants.tenants import Tenants
from twinkle.workers.jobs.script_process import LaunchPlan, ScriptProcess

_EVERYBODY = "*"
_KEY_S = 300.0
_RENEW_S = 60.0
_KEPT_FOLDER_S = 7 * 24 * 3600.0
_SCRIPT = "script.py"
_TRAVERSE = 0o001

_log = structlog.get_logger()


class Scripts:
    """See :class:`twinkle.jobs.script_tools.ScriptTools`."""

    def __init__(self, settings: Settings, tenants: Tenants, clock: Clock) -> None:
        self._settings = settings
        self._tenants = tenants
        self._clock = clock
        self._root = Path(settings.script_folder or settings.home / "scripts").absolute()

    @asynccontextmanager
    async def run_script(self, request: ScriptRequest) -> AsyncIterator[RunningScript]:
        """See :meth:`twinkle.jobs.script_tools.ScriptTools.run_script`."""
        await asyncio.to_thread(self._check_allowed, request.tenant)
        user = self._user()
        folder = await asyncio.to_thread(self._furnish, request, user)
        name = _key_name(request.job)
        # Those of attempts whose runner was lost end now.
        await asyncio.to_thread(self._tenants.end_lent_keys, request.tenant, name)
        lend = partial(self._tenants.lend_key, request.tenant, name, expires_at=self._clock.now() + _KEY_S)
        key = await asyncio.to_thread(lend)
        renewing = asyncio.create_task(self._renew(request.tenant, name), name="script key")
        say_if_it_ends(renewing)
        try:
            plan = self._plan(request, folder, user, key)
            script = await ScriptProcess.start(plan, folder, folder_bytes=self._settings.script_folder_bytes)
            try:
                yield script
            finally:
                await script.stop()
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            await asyncio.to_thread(self._tenants.end_lent_keys, request.tenant, name)

    async def forget_script(self, job: str) -> None:
        """See :meth:`twinkle.jobs.script_tools.ScriptTools.forget_script`."""
        await asyncio.to_thread(shutil.rmtree, self._root / job, ignore_errors=True)

    def _check_allowed(self, tenant: str) -> None:
        allowed = self._settings.script_tenants
        if not {_EVERYBODY, self._tenants.name_of(tenant)} & set(allowed):
            raise JobFailed("not_allowed", "scripts are not allowed to you here; the operator decides who may run some")

    def _user(self) -> pwd.struct_passwd | None:
        """Whom scripts run as; ``None`` is whom this process runs as.

        Raises:
            JobFailed: The operator has to say more.
        """
        name = self._settings.script_user
        if name == SAME_USER:
            return None
        problem = None
        if not name:
            problem = "TWINKLE_SCRIPT_USER names no system user"
        elif os.geteuid() != 0:
            problem = f"the jobs worker runs as no root, so that it cannot run scripts as {name!r}"
        else:
            try:
                return pwd.getpwnam(name)
            except KeyError:
                problem = f"there is no system user {name!r}"
        raise JobFailed(
            "not_configured", f"{problem}; the operator may set TWINKLE_SCRIPT_USER={SAME_USER} to do without one"
        )

    def _furnish(self, request: ScriptRequest, user: pwd.struct_passwd | None) -> Path:
        """The job's own folder with the script in it; what an attempt before this one left there stays."""
        if not self._root.exists():
            self._root.mkdir(parents=True)
            # Whatever this process is told to keep to itself: the users of scripts go through here.
            self._root.chmod(0o711)
        self._remove_old()
        folder = self._root / request.job
        folder.mkdir(mode=0o700, exist_ok=True)
        if user is not None:
            unreachable = next((one for one in folder.parents if not _is_reachable(one, user)), None)
            if unreachable is not None:
                raise JobFailed(
                    "not_configured",
                    f"the user of scripts cannot reach their folder; the operator may set TWINKLE_SCRIPT_FOLDER"
                    f" to a place that {user.pw_name!r} can reach",
                )
            os.chown(folder, user.pw_uid, user.pw_gid)
        # Taken away first: where the folder's owner has put a link, it must not be followed.
        path = folder / _SCRIPT
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o444)
        with os.fdopen(descriptor, "wb") as script:
            os.fchmod(script.fileno(), 0o444)
            script.write(request.source)
        return folder

    def _remove_old(self) -> None:
        """End the folders of jobs that went on elsewhere, or nowhere."""
        before = time.time() - _KEPT_FOLDER_S
        for folder in self._root.iterdir():
            if folder.stat(follow_symlinks=False).st_mtime < before:
                _log.info("script.folder_removed", folder=folder.name, next="nothing: nobody came back for it")
                shutil.rmtree(folder, ignore_errors=True)

    def _plan(self, request: ScriptRequest, folder: Path, user: pwd.struct_passwd | None, key: str) -> LaunchPlan:
        settings = self._settings
        python = Path(settings.script_python or sys.executable)
        url = settings.script_server_url or settings.public_url or f"http://{settings.host}:{settings.port}"
        seconds = [settings.script_wall_s, *([] if request.max_seconds is None else [float(request.max_seconds)])]
        return LaunchPlan(
            command=[str(python), str(folder / _SCRIPT), *request.arguments],
            environment={
                "PATH": os.pathsep.join([str(python.parent), "/usr/local/bin", "/usr/bin", "/bin"]),
                "HOME": str(folder),
                "TMPDIR": str(folder),
                "LANG": "C.UTF-8",
                "PYTHONUNBUFFERED": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "TWINKLE_JOB_ID": request.job,
                "TWINKLE_SERVER_URL": url,
                "TWINKLE_SERVER_TOKEN": key,
                "TINKER_BASE_URL": url,
                "TINKER_API_KEY": key,
            },
            folder=str(folder),
            uid=None if user is None else user.pw_uid,
            gid=None if user is None else user.pw_gid,
            wall_s=min(seconds),
            cpu_s=settings.script_cpu_s,
            memory_bytes=settings.script_memory_bytes,
            file_bytes=settings.script_file_bytes,
            num_processes=settings.script_processes,
        )

    async def _renew(self, tenant: str, name: str) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            renew = partial(self._tenants.renew_lent_keys, tenant, name, expires_at=self._clock.now() + _KEY_S)
            try:
                await asyncio.to_thread(renew)
            except StorageUnavailable as error:
                _log.warning("script.key_not_renewed", error=error.message, next="it is tried again")


def _key_name(job: str) -> str:
    return f"job {job}"


def _is_reachable(folder: Path, user: pwd.struct_passwd) -> bool:
    facts = folder.stat()
    return bool(facts.st_mode & _TRAVERSE) or facts.st_uid == user.pw_uid
