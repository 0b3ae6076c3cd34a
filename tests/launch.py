"""Runs a program in several ranks, as torchrun does, but imports rl2 once and forks the ranks.

    launch.py WORLD SCRIPT [argument ...]
    launch.py WORLD -m MODULE [argument ...]

The imports take longer than many a test. When a rank fails, the others get SIGTERM, and the exit
status is 1. Kills, restarts and several nodes are tested with torchrun itself.
"""

import atexit
import os
import runpy
import signal
import sys
from pathlib import Path

from forked import MAINS, become_rank, host_store


def run(command: list[str]) -> None:
    """Runs the program in this process, as Python would."""
    if command[0] != "-m":
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")
        return
    sys.argv = command[1:]
    name = command[1].removeprefix("rl2.trainer.")
    if name in MAINS:  # it is imported already
        MAINS[name]()
    else:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)


def wait(ranks: set[int]) -> int:
    """Waits for these processes. Returns 0 if all succeed, else 1."""
    failed = False
    while ranks:
        process_id, status = os.wait()
        ranks.discard(process_id)
        if status and not failed:
            failed = True
            for rank in ranks:
                os.kill(rank, signal.SIGTERM)
    return int(failed)


def main(world: int, command: list[str]) -> None:
    port = host_store()
    launch_id = f"launch_{os.getpid()}"
    ranks = set()
    for rank in range(world):
        process_id = os.fork()
        if process_id == 0:
            atexit.unregister(os.kill)  # the process of the store is the parent's
            become_rank(rank, world, port, launch_id)
            run(command)
            return
        ranks.add(process_id)
    sys.exit(wait(ranks))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
