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

import torch
import torch.distributed as dist

from rl2.optimizer import AdamW
from rl2.trainer import dpo, ppo, rm, sft
from rl2.worker import Worker

MAINS = {"ppo": ppo.main, "sft": sft.main, "dpo": dpo.main, "rm": rm.main}
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


def run(number: int, main, arguments: list[str], kill_at: int, sgd: bool) -> None:
    """One run, in its own process. `kill_at` 0 kills nothing."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"run {number}", dist.TCPStore(address, port, is_master=False))
    dist.rendezvous = lambda url, timeout: iter([(store, RANK, WORLD_SIZE)])
    if sgd:
        AdamW._change = descend
    if kill_at and RANK == WORLD_SIZE - 1:
        Worker._step = kill_in_step(Worker._step, kill_at)
    sys.argv[1:] = arguments
    main()


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


def launch(number: int, words: list[str]) -> None:
    """Starts the run that `words` describe, waits for it and checks how it ends."""
    trainer_at = next(i for i, word in enumerate(words) if word in MAINS)
    options = dict(word.partition("=")[::2] for word in words[:trainer_at])
    kill_at = int(options.get("kill", 0))
    main = MAINS[words[trainer_at]]
    arguments = (number, main, words[trainer_at + 1 :], kill_at, "sgd" in options)
    process = multiprocessing.get_context("fork").Process(target=run, args=arguments)
    process.start()
    process.join()
    ends_as_expected = (process.exitcode != 0) if kill_at else (process.exitcode == 0)
    assert ends_as_expected, f"{' '.join(words)}: exit code {process.exitcode}"


def main(words: list[str]) -> None:
    for number, (is_separator, run_words) in enumerate(
        itertools.groupby(words, lambda word: word == "--")
    ):
        if not is_separator:
            launch(number, list(run_words))


if __name__ == "__main__":
    main(sys.argv[1:])
