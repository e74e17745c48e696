"""Starts one script and sees to its end. Runs as a process of its own, by its path, and imports nothing of ours.

Standard input brings one line of JSON and then stays open for as long as the script may run: its end is that of the
runner, whatever became of it. Every process that descends from the script ends with it, also those that left its group.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0
_LOOK_S = 0.1
_CPU_GRACE_S = 5
_LIMITS = {
    "memory_bytes": resource.RLIMIT_AS,
    "cpu_s": resource.RLIMIT_CPU,
    "file_bytes": resource.RLIMIT_FSIZE,
    "num_processes": resource.RLIMIT_NPROC,
}


def main() -> None:
    """Run what the first line names; tell how it ended through the descriptor that it names."""
    plan = json.loads(_first_line())
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        try:
            _become(plan, prctl)
        except BaseException as error:  # noqa: BLE001 - a child that cannot become the script must not go on as us
            os.write(2, f"cannot start the script: {error}\n".encode())
            os._exit(127)
    status, ended_by = _watch(pid, time.monotonic() + plan["wall_s"])
    _end_all()
    code = os.waitstatus_to_exitcode(status)
    os.write(plan["report_fd"], json.dumps({"code": code, "ended_by": ended_by}).encode())


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            sys.exit(0)
        line += piece
    return line


def _become(plan: dict, prctl) -> None:  # type: ignore[no-untyped-def, type-arg]
    """Turn into the script: a session, limits, a user and an environment of its own."""
    os.setsid()
    os.chdir(plan["folder"])
    for name, limit in _LIMITS.items():
        # At the first limit of its processor time it is told, by a signal of its own; at the second it is killed.
        grace = _CPU_GRACE_S if limit == resource.RLIMIT_CPU else 0
        resource.setrlimit(limit, (plan[name], plan[name] + grace))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if plan["uid"] is not None:
        os.setgroups([])
        os.setresgid(plan["gid"], plan["gid"], plan["gid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    os.umask(0o077)
    # After the change of the user, which would take it back.
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 1024)
    os.execve(plan["command"][0], plan["command"], plan["environment"])


def _watch(pid: int, deadline: float) -> "tuple[int, str]":
    """Wait until the script ends; end it when its time is over or nobody waits for it any more."""
    ended_by = "itself"
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status, ended_by
        is_over = time.monotonic() > deadline
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if is_over or (readable and not os.read(0, 1024)):
            ended_by = "time" if is_over else "stop"
            return _stop(pid), ended_by


def _stop(pid: int) -> int:
    """Ask it to end, then make it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
    ends_at = time.monotonic() + _GRACE_S
    while time.monotonic() < ends_at:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(_LOOK_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _end_all() -> None:
    """End what the script has left behind: orphans become children of this process, however far away they went."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> "list[int]":
    me = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # Its name may hold anything, also parentheses and blanks.
                parent = int(stat.read().rpartition(b")")[2].split()[1])
                if parent == me:
                    found.append(int(name))
    return found


if __name__ == "__main__":
    main()
