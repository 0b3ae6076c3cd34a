"""Runs a trainer inside a process that goes on afterwards, such as a notebook.

What a run makes in its process is gone afterwards, or as it was before: the process group, the
lock of the folder, threads and child processes, signal handlers, environment variables, and the
state of torch's random numbers.
"""

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl2 import cleanup, progress
from rl2.algorithms.find import forget_files
from rl2.config.arguments import Arguments, take_keys
from rl2.config.parse import make_config
from rl2.config.problem import Problem, refuse
from rl2.config.schema import Config
from rl2.python_inputs import Inputs
from rl2.run.folder import AllStepsDone
from rl2.run.signals import user_errors
from rl2.run.watchdog import Watchdog

_is_training = threading.Lock()  # one run at a time: it has the process group and the phase


def train_inside(root: type, inputs: Inputs, start: Callable[[Any], None]) -> Path:
    """Trains in this process and returns the run folder. All threads but this one go on.

    `root` is the class of the config, and start(config) trains. ValueError lists the problems of
    the keys; RuntimeError if this process has a run, a process group or other ranks.
    """
    if "RANK" in os.environ:
        raise RuntimeError(
            "rl2.train runs in one process, and torchrun has started this one: start "
            "`torchrun ... -m rl2.trainer.NAME key=value` for several"
        )
    if not _is_training.acquire(blocking=False):
        raise RuntimeError("this process is training already: call rl2.train after that run")
    try:
        if dist.is_initialized():
            raise RuntimeError(
                "this process has a torch.distributed process group, and a run needs one of its "
                "own: call torch.distributed.destroy_process_group() first"
            )
        with _paused_event_loop(), _own_process():
            config: Any = make_config(root, take_keys(root, inputs.values, Arguments()))
            inputs.write(Path(config.trainer.save_dir))
            _start(start, config)
            return Path(config.trainer.save_dir).absolute()
    finally:
        _is_training.release()


def train_job(start: Callable[[Any], None], config: Config) -> None:
    """Trains with the config, after and before other runs of this process: a job of --multirun."""
    if "RANK" in os.environ:
        advice = "start it without torchrun, or one torchrun for each value"
        refuse([Problem("", f"--multirun runs its jobs in one process: {advice}")])
    with user_errors(), _own_process():
        _start(start, config)


def _start(start: Callable[[Any], None], config: Config) -> None:
    with Watchdog(config.trainer.watchdog), suppress(AllStepsDone):
        start(config)


@contextmanager
def _own_process() -> Iterator[None]:
    """A run's place: nothing of an earlier run is in it, and nothing of this one remains."""
    forget_files()
    progress.enter("loading")
    environment = dict(os.environ)
    switch_interval = sys.getswitchinterval()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())), cleanup.scope():
            yield
    finally:
        if sys.getswitchinterval() != switch_interval:  # Python rounds down what it is given
            sys.setswitchinterval(switch_interval)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        gc.unfreeze()
        gc.collect()  # models are in cycles of references
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@contextmanager
def _paused_event_loop() -> Iterator[None]:
    """Inside, this thread runs no event loop, as a run has some and a thread runs one at a time.

    A notebook runs its cells in one, which afterwards goes on.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task()
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio.set_event_loop(loop)  # asyncio.run leaves the thread without one
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)
