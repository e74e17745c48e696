"""How a rank ends: it says so in a sentence, and does not outlive the others.

A rank that waits in a collective for one that is gone runs no Python. The launcher stops it with SIGTERM, or its
connections break; either way the last thing to be read of it is why.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from twinkle.core.errors import TwinkleError

Notifier = Callable[[str], object]

LOST_PEER = ("connection closed by peer", "connection reset by peer", "broken pipe", "connect timeout", "nccl error")
"""What collectives say when another rank is gone, in lower case."""
STOPPED = 128 + signal.SIGTERM
LEAST_PATIENCE_S = 10.0
"""How long ranks are waited for at least once one of them has failed."""
NEXT = "go on from the last checkpoint with resume_from_checkpoint"


def patience_s(taken_s: float) -> float:
    """How long the others may still take for a call with which one rank failed after so many seconds.

    An error that all have in common comes to each of them in about the same time. One that befell a single rank leaves
    the others waiting for it in the middle of a collective, as long as that is let wait for anything.
    """
    return max(LEAST_PATIENCE_S, taken_s)


def watch_end(*, rank: int, world_size: int, name: str | None, notifier: Notifier | None) -> None:
    """Say why this rank ends, when it does by an exception or because the launcher stops it; on the main thread."""
    whose = f"rank {rank} of {world_size}" + (f" of {name}" if name else "")
    _say_exceptions(whose, notifier)
    is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if world_size > 1 and is_free and threading.current_thread() is threading.main_thread():
        _end_on_sigterm(whose)


def _say_exceptions(whose: str, notifier: Notifier | None) -> None:
    show = sys.excepthook if not isinstance(sys.excepthook, _LastWords) else sys.excepthook.show
    sys.excepthook = _LastWords(whose, notifier, show)


class _LastWords:
    """What is done with an exception that nobody caught."""

    def __init__(self, whose: str, notifier: Notifier | None, show: Callable[..., object]) -> None:
        self.show = show
        self._whose = whose
        self._notifier = notifier

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if any(text in str(error).lower() for text in LOST_PEER):
            sentence = f"{self._whose} ends: it lost the connection to another rank, which has ended; {NEXT}"
        else:
            self.show(kind, error, trace)
            sentence = f"{self._whose} ends with {kind.__name__}: {error}"
        print(sentence, file=sys.stderr, flush=True)
        if self._notifier is not None and not issubclass(kind, (KeyboardInterrupt, SystemExit)):
            self._tell(self._notifier, sentence)

    @staticmethod
    def _tell(notifier: Notifier, sentence: str) -> None:
        try:
            notifier(sentence)
        except (TwinkleError, OSError) as error:
            print(f"the notifier was not reached: {error}", file=sys.stderr, flush=True)


def _end_on_sigterm(whose: str) -> None:
    # Python's own handlers run between bytecodes, and there are none in a collective; what the interpreter writes to
    # this socket it writes from the signal's handler itself.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.signal(signal.SIGTERM, _do_nothing)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_wait_for_sigterm, args=(reader, writer, whose), name="rank-end", daemon=True).start()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The thread that reads the socket acts."""


def _wait_for_sigterm(reader: socket.socket, writer: socket.socket, whose: str) -> None:
    while received := reader.recv(1):
        if received[0] == signal.SIGTERM:
            message = f"{whose} ends: the launcher stopped it, as it does when another rank has failed; {NEXT}\n"
            os.write(sys.stderr.fileno(), message.encode())
            os._exit(STOPPED)
    writer.close()
