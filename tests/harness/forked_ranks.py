"""The ranks of a training script, forked from one process that has imported what all of them need.

    python -m harness.forked_ranks NUM_RANKS MODULE ARGUMENT...

Each calls ``MODULE.main()`` in the environment that torchrun would give it; importing torch and transformers, which
takes longer than a tiny model's training, is done once. torchrun itself starts the scripts of the cookbook and of the
documents.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable

from harness.servers import free_port


def main() -> int:
    """Start the ranks and wait for them; the exit code of the first that fails, whose fellows are ended."""
    num_ranks, module, *arguments = sys.argv[1:]
    script: Callable[[], None] = importlib.import_module(module).main
    sys.argv = [module, *arguments]
    os.environ |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = {_fork(script, rank) for rank in range(int(num_ranks))}
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status != 0:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status)
    return 0


def _fork(script: Callable[[], None], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    code = 1
    try:
        script()
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must not return into what it was forked from
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
