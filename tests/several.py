"""Runs several trainers in one launch, so that the imports happen once.

    several.py [kill=N] [sgd] TRAINER key=value ... [-- another run] ...

Each run is a forked process with its own process group in torchrun's store. The parent process
runs no trainer.

kill=N kills the last rank by SIGKILL in the N-th update, after the gradients are computed and
before the weights change. The other ranks must end because of it.

sgd selects plain gradient descent, because AdamW's first steps are little more than the sign of
the gradient.
"""

import itertools
import multiprocessing
import os
import signal
import sys
from functools import partial

import torch
import torch.distributed as dist

from rl2.trainer import dpo, ppo, rm, sft
from rl2.worker import Worker

MAINS = {"ppo": ppo.main, "sft": sft.main, "dpo": dpo.main, "rm": rm.main}
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def run(number: int, main, words: list[str], kill_at: int, sgd: bool) -> None:
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"run {number}", dist.TCPStore(*address, is_master=False))
    dist.init_process_group = partial(
        dist.init_process_group, store=store, rank=RANK, world_size=WORLD
    )
    if sgd:
        torch.optim.AdamW = plain_descent
    if kill_at and RANK == WORLD - 1:
        Worker._step = killed(Worker._step, kill_at)
    sys.argv[1:] = words
    main()


def plain_descent(groups, lr, **_):
    return torch.optim.SGD(
        [{"params": [parameter]} for group in groups for parameter in group["params"]], lr
    )


def killed(step, kill_at):
    calls = itertools.count(1)

    def step_or_die(worker):
        if next(calls) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(worker)

    return step_or_die


def main(words: list[str]) -> None:
    for number, (_, part) in enumerate(itertools.groupby(words, lambda word: word == "--")):
        part = list(part)
        if part == ["--"]:
            continue
        at = next(i for i, word in enumerate(part) if word in MAINS)
        options = dict(word.partition("=")[::2] for word in part[:at])
        kill_at = int(options.get("kill", 0))
        arguments = (number, MAINS[part[at]], part[at + 1 :], kill_at, "sgd" in options)
        process = multiprocessing.get_context("fork").Process(target=run, args=arguments)
        process.start()
        process.join()
        as_wanted = (process.exitcode != 0) if kill_at else (process.exitcode == 0)
        assert as_wanted, f"{' '.join(part)}: exit code {process.exitcode}"


if __name__ == "__main__":
    main(sys.argv[1:])
