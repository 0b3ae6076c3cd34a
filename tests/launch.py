"""Starts ranks as torchrun does, from a process that has imported rl2: it forks them.

The imports take longer than many a test. `serve` runs in a process of its own: forked ranks need a
parent without threads. When a rank fails, the others get SIGTERM, and the exit status is 1. Kills,
restarts and several nodes are tested with torchrun itself.
"""

import atexit
import gc
import itertools
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import torch
from forked import MAINS, become_rank, host_store

from rl2.optimizer import AdamW
from rl2.worker import Worker


def serve() -> None:
    """Reads requests, one a line, and answers each with two lines: a process id, an exit status.

    The process starts the ranks, and leads their process group. A request is JSON: the number of
    ranks `world`, the `command` (SCRIPT argument ..., or -m MODULE argument ...), its `environment`
    and working directory `folder`, the files `stdout` and `stderr`, and `changes`, see `alter`.
    """
    gc.freeze()  # or each collection in a rank passes over all objects of the imports
    for line in sys.stdin:
        process_id = os.fork()
        if process_id == 0:
            start(**json.loads(line))
            return
        print(process_id, flush=True)
        _, status = os.waitpid(process_id, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def start(
    world: int,
    command: list[str],
    environment: dict,
    folder: str,
    stdout: str,
    stderr: str,
    changes: dict[str, int],
) -> None:
    """Becomes a process with this environment, starts the ranks and waits for them."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, file in enumerate((os.devnull, stdout, stderr)):
        os.dup2(os.open(file, os.O_RDWR), descriptor)
    port = host_store()
    launch_id = f"launch_{os.getpid()}"
    ranks = set()
    for rank in range(world):
        process_id = os.fork()
        if process_id == 0:
            atexit.unregister(os.kill)  # the process of the store is the parent's
            become_rank(rank, world, port, launch_id)
            alter(changes, is_last_rank=rank == world - 1)
            run(command)
            return
        ranks.add(process_id)
    sys.exit(wait_for_all(ranks) if "kill" in changes else wait(ranks))


def alter(changes: dict[str, int], is_last_rank: bool) -> None:
    """Changes how this rank trains.

    "sgd": plain gradient descent, because AdamW's first steps are little more than the sign of the
    gradient. "kill": SIGKILL in the last rank's update of this number, after the gradients are
    computed and before the weights change.
    """
    if "sgd" in changes:
        AdamW._change = descend
    if "kill" in changes and is_last_rank:
        Worker._step = kill_in_step(Worker._step, changes["kill"])


def descend(optimizer, lr, shards, gradients, *moments):
    """A step of plain gradient descent in the place of AdamW's."""
    torch._foreach_add_(shards, gradients, alpha=-lr)


def kill_in_step(step, kill_at):
    """`step`, but the call number `kill_at` kills this process instead."""
    calls = itertools.count(1)

    def step_or_die(worker, skip):
        if next(calls) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(worker, skip)

    return step_or_die


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


def wait_for_all(ranks: set[int]) -> int:
    """Waits for these processes. Returns 1 if all fail by themselves, else 0."""
    return int(all([os.wait()[1] for _ in ranks]))


if __name__ == "__main__":
    serve()
