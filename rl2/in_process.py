"""Runs a trainer inside a process that goes on afterwards, such as a notebook.

What a run makes in its process is gone afterwards, or as it was before: the process group, the
lock of the folder, threads and child processes, signal handlers, environment variables, and the
state of torch's random numbers.
"""

import asyncio
import contextvars
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rl2 import cleanup, progress
from rl2.algorithms.find import forget_files
from rl2.config.arguments import Arguments, take_keys
from rl2.config.engines import choose_engine
from rl2.config.parse import compose, make_config
from rl2.config.problem import ConfigError, general_problem, refuse
from rl2.config.schema import PPOConfig
from rl2.python_inputs import Inputs, remove
from rl2.run.folder import AllStepsDone
from rl2.run.signals import StopSignal, user_errors
from rl2.run.watchdog import Watchdog
from rl2.thread_exceptions import raise_in_thread

Result = TypeVar("Result")

_is_training = threading.Lock()  # one run at a time: it has the process group and the phase


def train_inside(root: type, inputs: Inputs, start: Callable[[Any], None]) -> Path:
    """Trains in this process and returns the run folder. All threads but this one go on.

    `root` is the class of the config, and start(config) trains. ConfigError lists the problems of
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
        with StopSignal():
            return _call_beside_event_loop(partial(_train, root, inputs, start))
    finally:
        _is_training.release()


def _train(root: type, inputs: Inputs, start: Callable[[Any], None]) -> Path:
    with _own_process():
        config = _make_config(root, inputs)
        _check_engine(config)
        _start(start, config)
    return Path(config.trainer.save_dir).absolute()


def train_job(start: Callable[[Any], None], config: Any) -> None:
    """Trains with the config, after and before other runs of this process: a job of --multirun."""
    if "RANK" in os.environ:
        advice = "start it without torchrun, or one torchrun for each value"
        refuse([general_problem(f"--multirun runs its jobs in one process: {advice}")])
    with StopSignal(), user_errors(), _own_process():
        _start(start, config)


def _start(start: Callable[[Any], None], config: Any) -> None:
    with Watchdog(config.trainer.watchdog), suppress(AllStepsDone):
        start(config)


def _make_config(root: type, inputs: Inputs) -> Any:
    """Returns the checked config. Its input files are in the run folder, unless it is refused."""
    draft = compose(root, take_keys(root, inputs.values, Arguments()))
    if draft.config is None:
        raise ConfigError(draft.arguments.problems)
    folder = Path(draft.config.trainer.save_dir)
    written = inputs.write(folder)
    try:
        arguments = take_keys(root, inputs.list_values(folder), Arguments())
        return make_config(root, arguments)
    except ConfigError:
        remove(written)
        raise


def _check_engine(config: Any) -> None:
    """ValueError for SGLang on a thread of its own, where it cannot handle its signals."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or not isinstance(config, PPOConfig) or config.trainer.rollouts_from:
        return
    if choose_engine(config.rollout.engine)[0] == "sglang":
        raise ValueError(
            f"rollout.engine={config.rollout.engine}: SGLang starts from the main thread only, "
            "which runs an event loop here, as in every notebook: set rollout.engine=local, or "
            "train from a script"
        )


@contextmanager
def _own_process() -> Iterator[None]:
    """A run's place: nothing of an earlier run is in it, and nothing of this one remains."""
    forget_files()
    progress.enter("loading")
    with _preserved_process(), cleanup.scope():
        yield


@contextmanager
def _preserved_process() -> Iterator[None]:
    """Afterwards environment variables, random numbers and the switch of threads are as before."""
    environment = dict(os.environ)
    switch_interval = sys.getswitchinterval()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        sys.setswitchinterval(switch_interval)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        gc.collect()  # models are in cycles of references
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _call_beside_event_loop(function: Callable[[], Result]) -> Result:
    """Returns function(), called on a thread of its own if this one runs an event loop.

    A run has event loops itself, and a thread can run one at a time. What a signal raises here ends
    the call.
    """
    if not _has_event_loop():
        return function()
    outcome: Future[Result] = Future()
    is_over = threading.Event()
    context = contextvars.copy_context()

    def call() -> None:
        try:
            outcome.set_result(context.run(function))
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            is_over.set()

    thread = threading.Thread(target=call, name="rl2.train", daemon=True)
    thread.start()
    interruption: BaseException | None = None
    while not is_over.is_set() and thread.is_alive():
        try:
            # A signal that the system gives to another thread is handled after the wait. `join`
            # would take an interrupted thread for ended.
            is_over.wait(0.05)
        except BaseException as error:
            interruption = error
            raise_in_thread(thread, type(error))
    if interruption is not None and not outcome.done():  # it came between the call and its outcome
        raise interruption
    return outcome.result()
