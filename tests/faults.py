"""test_faults.py runs this: what runs do when signals, hangs and lost ranks meet them.

    faults.py FOLDER

FOLDER has the model `tiny` and `rows.jsonl`. All runs are forked from this process.
"""

import itertools
import os
import re
import resource
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import read_metrics
from forked import ForkedRun, ForkedRuns

from rl2.attention.ring import PackedAttention
from rl2.run import signals
from rl2.run.folder import Checkpoints
from rl2.trainer import offline_run
from rl2.worker import Worker


def arguments(folder: Path, name: str, *more: str) -> list[str]:
    """Arguments of an SFT run that writes to `folder`/`name`."""
    return [
        f"actor.model_name={folder / 'tiny'}",
        f"data.path={folder / 'rows.jsonl'}",
        "data.batch_size=2",
        "actor.dtype=float32",
        "trainer.disable_wandb=true",
        f"trainer.save_dir={folder / name}",
        *more,
    ]


def before(module, name: str, action) -> None:
    """Replaces the function `name` of `module`: it calls `action` first, then what it was."""
    function = getattr(module, name)

    def changed(*positional, **keywords):
        action()
        return function(*positional, **keywords)

    setattr(module, name, changed)


def check_signals_while_loading(runs: ForkedRuns, folder: Path) -> None:
    """They end the run at once, also where a rank waits in C: there no handler of Python runs."""

    def hang(rank: int) -> None:
        def wait() -> None:
            print("reached", flush=True)
            time.sleep(60 * rank)

        before(offline_run, "init_distributed", wait)

    started = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        run = runs.start(2, "sft", arguments(folder, f"loading_{number}"), hang)
        started.append((run, number))
    for run, number in started:
        run.wait_for(lambda run=run: run.output.count("reached") == 2)
        time.sleep(0.5)
        run.send(number)
        assert run.wait(5) == [-number] * 2, run.output
        assert "Traceback" not in run.output, run.output


def start_slow_run(
    runs: ForkedRuns, folder: Path, name: str, *more: str, world: int = 1
) -> ForkedRun:
    """A run that can be evaluated and whose steps take a second, behind the start of step 1."""

    def prepare(rank: int) -> None:
        before(Worker, "update", lambda: (print("update begins", flush=True), time.sleep(0.5)))

    test = f"data.test_path={folder / 'rows.jsonl'}"
    words = arguments(folder, name, test, "trainer.n_epochs=9", *more)
    run = runs.start(world, "sft", words, prepare)
    run.wait_for(lambda: run.output.count("update begins") >= world)
    return run


def check_a_signal_saves_and_does_not_evaluate(runs: ForkedRuns, folder: Path) -> None:
    """Also where it comes twice, as `timeout` sends it."""
    run = start_slow_run(runs, folder, "stopped", world=2)
    run.send(signal.SIGTERM)
    run.wait_for(lambda: "stopping" in run.output)
    run.send(signal.SIGTERM)
    assert run.wait() == [0, 0], run.output
    assert run.output.count("stopping") == 1, run.output
    lines = read_metrics(folder / "stopped")
    assert [line["step"] for line in lines] == [0, 1]
    assert "test/loss" in lines[0] and "test/loss" not in lines[1]
    assert [path.name for path in (folder / "stopped/checkpoints").iterdir()] == ["step_1"]
    checkpoint = folder / "stopped/checkpoints/step_1/run.json"
    exported = folder / "stopped/model/config.json"
    assert checkpoint.stat().st_mtime_ns < exported.stat().st_mtime_ns
    assert "the evaluation of step 1 is left out" not in run.output, "none was due"


def check_a_second_signal_ends_all_ranks_at_once(runs: ForkedRuns, folder: Path) -> None:
    """Before the step is saved. A lost terminal stops a run too."""
    signals.SECONDS_OF_ONE_REQUEST = 0.05
    for step, world, number in ((1, 2, signal.SIGHUP), (2, 1, signal.SIGINT)):
        name = f"told_{step}"
        run = start_slow_run(runs, folder, name, "trainer.save_freq=1", world=world)
        run.wait_for(lambda run=run, n=step * world: run.output.count("update begins") == n)
        run.send(number)
        run.wait_for(lambda run=run: "stopping" in run.output)
        time.sleep(0.1)
        run.send(number)
        assert run.wait(5) == [-number] * world, run.output
        assert "Traceback" not in run.output, run.output
        names = [path.name for path in (folder / name).glob("checkpoints/*")]
        assert names == ["step_1"][: step - 1], "it saved the step"


def check_a_run_ignores_sighup_if_it_is_told_to(runs: ForkedRuns, folder: Path) -> None:
    """As by nohup."""
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = start_slow_run(runs, folder, "nohup", "trainer.max_steps=1")
    signal.signal(signal.SIGHUP, earlier)
    run.send(signal.SIGHUP)
    assert run.wait() == [0] and "stopping" not in run.output, run.output


def check_a_child_of_the_environment_ends_alone(runs: ForkedRuns, folder: Path) -> None:
    """A process pool ends its forked children with SIGTERM, which must not stop the run."""

    def end_a_child() -> None:
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        time.sleep(0.2)  # Python forgets a signal that comes while it sets up the child
        os.kill(child, signal.SIGTERM)
        print("the child's status is", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def prepare(rank: int) -> None:
        before(Worker, "update", end_a_child)

    run = runs.start(1, "sft", arguments(folder, "child"), prepare)
    assert run.wait(15) == [0], run.output
    assert run.output.count("the child's status is 143") == 2, run.output
    assert [line["step"] for line in read_metrics(folder / "child")] == [1, 2]


def fill_disk(rank: int, module, name: str, call: int) -> None:
    """From the given call on, no file of the rank may grow beyond 8 kB, as on a full disk."""
    calls = itertools.count(1)

    def limit() -> None:
        if next(calls) == call:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))

    before(module, name, limit)


def check_full_disks(runs: ForkedRuns, folder: Path) -> None:
    """One message with the path. The checkpoint before it stands, and a new launch goes on."""
    options = ("trainer.save_freq=1", "trainer.n_epochs=2")
    for name, world, module, function, call, path, done in (
        ("full_checkpoint", 2, Checkpoints, "save", 2, "checkpoints/step_2", 1),
        ("full_export", 1, Worker, "_save_model", 1, "model.partial", 4),
    ):
        fill = partial(fill_disk, module=module, name=function, call=call)
        run = runs.start(world, "sft", arguments(folder, name, *options), fill)
        assert run.wait() == [1] * world, run.output
        [message] = [line for line in run.output.splitlines() if line.startswith("error: ")]
        assert f"{folder / name / path} could not be written" in message, run.output
        assert "GiB are free" in message and "Traceback" not in run.output, run.output
        run = runs.start(world, "sft", arguments(folder, name, *options))
        assert run.wait() == [0] * world, run.output
        assert f"step_{done}: {done} of 4 steps are done" in run.output, run.output
        assert [line["step"] for line in read_metrics(folder / name)] == [1, 2, 3, 4]
        assert (folder / name / "model/model.safetensors").exists()


def check_a_port_in_use(runs: ForkedRuns, folder: Path) -> None:
    """Without torchrun rank 0 listens at MASTER_PORT, where another run may do so already."""

    def prepare(rank: int) -> None:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(runs.port)}

    run = runs.start(1, "sft", arguments(folder, "port"), prepare)
    assert run.wait() == [1], run.output
    assert f"MASTER_PORT=127.0.0.1:{runs.port}" in run.output, run.output
    assert "--standalone" in run.output and "Traceback" not in run.output, run.output


WATCHDOG = "trainer.watchdog=1"


def hang_in_update(rank: int, hanging_rank: int, hang) -> None:
    """The rank calls `hang` before its first update, and `int`, which does nothing, later."""
    calls = iter([hang])
    if rank == hanging_rank:
        before(Worker, "update", lambda: next(calls, int)())


def loop_endlessly() -> None:
    while True:
        pass


def reduce_alone() -> None:
    dist.all_reduce(torch.zeros(1))  # which the other ranks do not join


def stop() -> None:
    time.sleep(0.5)  # until the others know the phase
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_lock_of_python() -> None:
    re.match("(a+)+$", 40 * "a" + "b")  # takes longer than anyone waits


def wait_for_lines(run: ForkedRun, *patterns: str) -> None:
    """Waits until the output has a line for each of the regular expressions."""
    for pattern in patterns:
        run.wait_for(lambda p=pattern: re.search(p, run.output) is not None, 20)


def check_the_watchdog(runs: ForkedRuns, folder: Path) -> None:
    """All hangs at once, since each takes seconds of waiting."""

    def start(name: str, world: int, hang, hanging_rank: int = 0) -> ForkedRun:
        prepare = partial(hang_in_update, hanging_rank=hanging_rank, hang=hang)
        return runs.start(world, "sft", arguments(folder, name, WATCHDOG), prepare)

    stopped = start("sigstop", 2, stop, 1)
    lost = start("lost", 2, reduce_alone, 0)
    alone = start("alone", 1, loop_endlessly)
    locked = start("locked", 1, hold_the_lock_of_python)
    try:
        place = f"host {socket.gethostname()}, pid {stopped.process_ids[0]}"
        wait_for_lines(stopped, f"rank 0 .{place}. .*; its main thread")
        assert "rank 1" not in stopped.output, stopped.output
        wait_for_lines(lost, "rank 0 .*; its main thread", "rank 1 .*; its main thread")
        wait_for_lines(lost, "File .*faults.py.* in reduce_alone")
        wait_for_lines(alone, "phase update; its main thread", "File .* in loop_endlessly")
        wait_for_lines(locked, "Timeout", "File .* in hold_the_lock_of_python")
        stopped.send(signal.SIGCONT)
        assert stopped.wait() == [0, 0], stopped.output[-3000:]
    finally:
        for run in (stopped, lost, alone, locked):
            run.end()


def check_the_watchdog_is_quiet_about_slow_work(runs: ForkedRuns, folder: Path) -> None:
    """A rank whose environment and micro-batches are slow, for which the other one waits."""

    def prepare(rank: int) -> None:
        if rank == 1:
            before(PackedAttention, "__call__", lambda: time.sleep(1.5))  # in each layer

    rows = folder / "prompts.jsonl"
    rows.write_text(2 * '{"messages": "say a", "answer": ""}\n')
    env = folder / "slow_env.py"
    env.write_text(
        "import os, time\n"
        "num_calls = 0\n"
        "def reward_fn(messages, answer):\n"
        "    global num_calls\n"
        "    num_calls += 1  # four calls try the environment before the run\n"
        "    time.sleep(4 if os.environ['RANK'] == '1' and num_calls > 4 else 0)\n"
        "    return len(messages[-1]['content'])\n"
    )
    # The machine may be busy with other tests.
    options = arguments(folder, "slow", "trainer.watchdog=3", "trainer.max_steps=1")
    options = [option for option in options if not option.startswith("data.")]
    options += [f"data.path={rows}", f"rollout.env_path={env}", "data.prompts_per_rollout=2"]
    options += ["data.responses_per_prompt=2", "rollout.train_sampling_params.max_new_tokens=4"]
    options += ["data.max_length=32", "rollout.env_timeout=9"]
    run = runs.start(2, "ppo", options, prepare)
    assert run.wait(100) == [0, 0], run.output[-3000:]
    assert not re.search("watchdog:|Timeout", run.output), run.output[:3000]


def check_the_others_end_with_a_lost_rank(runs: ForkedRuns, folder: Path) -> None:
    """Within seconds, with one message."""
    prepare = partial(
        hang_in_update, hanging_rank=1, hang=lambda: os.kill(os.getpid(), signal.SIGKILL)
    )
    run = runs.start(2, "sft", arguments(folder, "killed", WATCHDOG), prepare)
    start = time.monotonic()
    assert run.wait(30) == [1, -signal.SIGKILL], run.output
    assert time.monotonic() - start < 15
    assert "error: another process ended" in run.output, run.output
    assert "Traceback" not in run.output, run.output


def main(folder: Path) -> None:
    runs = ForkedRuns(folder)
    for check in [value for name, value in globals().items() if name.startswith("check_")]:
        start = time.monotonic()
        check(runs, folder)
        print(f"{time.monotonic() - start:5.1f} s  {check.__name__}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
