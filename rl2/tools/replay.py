"""`rl2 replay RUN --step N`: runs a recorded step again, and compares it with the record.

`rl2.tools.rerun` runs it, in processes of its own and in another folder. RUN is only read.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rl2.report.page import Record
from rl2.run.checkpoints import Checkpoints, step_of
from rl2.tools.compare import Comparison, Difference, Run
from rl2.tools.diff import describe_steps, find_changes, print_changes, print_result

PACKAGE = Path(__file__).parent.parent
# On GPUs kernels may add in any order: numbers may differ by so much, or by this fraction, and the
# hash of the weights is not compared. It has not been tried on a GPU.
GPU_TOLERANCE = 1e-2


class Plan(NamedTuple):
    """How a step is run again."""

    trainer: str  # the name of the config's class
    config: Path  # the config.yaml of the launch that did the step
    checkpoint: Path | None  # where it begins; None: at the beginning
    steps: range  # that are run
    start: Record  # the launch that did the step, of run.json


def main() -> None:
    """Prints the comparison. Exit status 0: the same, 1: not, 2: the step cannot be run again."""
    parser = argparse.ArgumentParser(
        prog="rl2 replay",
        description="Runs a recorded step again, from the checkpoint before it, and says whether "
        "rollouts, rewards, advantages, metrics and weights are those that were recorded.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run; it is only read")
    parser.add_argument("--step", type=int, required=True, help="the step, 1 or more")
    parser.add_argument(
        "--rollouts",
        choices=("again", "saved"),
        default="again",
        help="again: the answers are sampled again; saved: those that trainer.save_tokens kept "
        "are taken; PPO alone has some",
    )
    parser.add_argument(
        "--out", type=Path, help="a new folder that keeps the records of the replay; else none does"
    )
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="rl2-replay-") as folder:
            out = arguments.out or Path(folder)
            found = replay(arguments.run, arguments.step, arguments.rollouts, out.resolve())
    except (OSError, ValueError, RuntimeError) as error:
        parser.exit(2, f"rl2 replay: {error}\n")
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell tells of Ctrl-C
    sys.exit(int(found is not None))


def replay(folder: Path, step: int, rollouts: str, out: Path) -> Difference | None:
    """Runs the step again in the folder `out`. Prints and returns the first difference, if any.

    ValueError or RuntimeError if the step cannot be run again.
    """
    run = Run(folder.resolve())
    plan = make_plan(run, step)
    if rollouts == "saved":
        check_tokens(run, plan.steps)
    prepare(out, run)
    command = make_command(run, plan, rollouts, out)
    if len(plan.start["hosts"]) > 1:
        raise ValueError(
            f"{folder} ran on {len(plan.start['hosts'])} machines, and this command starts "
            "processes on one. With --out, a folder that all of them see, start this on each, with "
            f"HOST the name of the first:\n  {shlex.join(command)}\n"
            f"and then compare:\n  rl2 diff {folder} {out}"
        )
    place = f"from {plan.checkpoint}" if plan.checkpoint else "from the beginning of the run"
    print(f"{describe_steps(plan.steps)} of {folder} again, {place}", flush=True)
    run_processes(command, plan.start)
    return report(run, Run(out), plan)


def make_plan(run: Run, step: int) -> Plan:
    """How the step is run again. ValueError if it cannot be."""
    if not {"starts", "identity", "date"} <= run.record.keys():
        raise ValueError(f"{run.folder}/run.json is missing or broken: it says how to run a step")
    recorded = [number for number in run.metrics if number > 0]
    if step not in recorded:
        raise ValueError(f"--step {step}: {run.folder} has recorded {describe_steps(recorded)}")
    checkpoints = Checkpoints(run.folder / "checkpoints")
    checkpoint = checkpoints.newest(before=step)
    if checkpoint is None and min(recorded) > 1:
        raise ValueError(
            f"{run.folder} went on from a checkpoint of another run, and has none of its own "
            f"before step {step}: replay the other run, or a later step"
        )
    done = step_of(checkpoint) if checkpoint else 0
    launches = [start for start in run.record["starts"] if start["step"] < step]
    has_later = launches[-1] != run.record["starts"][-1]
    return Plan(
        run.record["identity"]["trainer"],
        find_config(run, step) if has_later else run.folder / "config.yaml",
        checkpoint,
        range(done + 1, step + 1),
        launches[-1],
    )


def find_config(run: Run, step: int) -> Path:
    """The config.yaml of the first checkpoint from the step on: a later launch has replaced that of
    the run. If there is no such checkpoint it is that of the run."""
    checkpoints = Checkpoints(run.folder / "checkpoints")
    later = [checkpoints.path(saved) for saved in checkpoints.steps() if saved >= step]
    return [*later, run.folder][0] / "config.yaml"


def check_tokens(run: Run, steps: range) -> None:
    """ValueError unless the run has the tokens of these steps."""
    missing = [step for step in steps if len(run.rollout_files("train", step)) < 2]
    if missing:
        raise ValueError(
            f"--rollouts saved: {run.folder} has no tokens of {describe_steps(missing)}, which "
            "trainer.save_tokens=true keeps; --rollouts again samples them again"
        )


def prepare(out: Path, run: Run) -> None:
    """Makes the folder of the replay, whose run starts on the date of the recorded one.

    ValueError if there is something in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty: give a new folder")
    (out / "run.json").write_text(json.dumps({"date": run.record["date"]}))


def make_command(run: Run, plan: Plan, rollouts: str, out: Path) -> list[str]:
    """The program that runs the steps, with as many processes as the recorded launch had."""
    num_nodes, world_size = len(plan.start["hosts"]), plan.start["world_size"]
    command = [sys.executable]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={world_size // num_nodes}"]
        where = ["--rdzv_backend=c10d", "--rdzv_endpoint=HOST:29500", f"--nnodes={num_nodes}"]
        command += where if num_nodes > 1 else ["--standalone"]
    command += ["-m", "rl2.tools.rerun", f"--run={run.folder}", f"--out={out}"]
    command += [f"--trainer={plan.trainer}", f"--config={plan.config}", f"--rollouts={rollouts}"]
    command += [f"--step={plan.steps[-1]}"]
    return command + ([f"--checkpoint={plan.checkpoint}"] if plan.checkpoint else [])


def run_processes(command: list[str], start: Record) -> None:
    """Runs the program in the folder and with the threads of the recorded launch.

    RuntimeError if it fails; its messages come first.
    """
    variables = dict(os.environ)
    if "threads" in start:
        variables["OMP_NUM_THREADS"] = str(start["threads"])
    paths = [str(PACKAGE.parent), variables.get("PYTHONPATH")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    folder = start.get("folder")
    is_there = folder is not None and os.path.isdir(folder)
    done = subprocess.run(command, env=variables, cwd=folder if is_there else None)
    if done.returncode:
        where = "" if is_there else f"; it was started in {folder}, which is not here"
        raise RuntimeError(f"the step could not be run again (status {done.returncode}{where})")


def report(run: Run, again: Run, plan: Plan) -> Difference | None:
    """Prints what has changed since the run, and the first difference. Returns this one."""
    tolerance = 0.0
    if plan.start.get("gpu"):
        tolerance = GPU_TOLERANCE
        for line in run.metrics.values():
            for name in [name for name in line if name.startswith("weights")]:
                del line[name]
        print(f"on a GPU: compared with a tolerance of {tolerance}, without the weights' hash")
    comparison = Comparison(run, again, tolerance)
    found = comparison.find(plan.steps)
    changes, _ = find_changes(run, again, found.step if found else plan.steps[-1])
    print_changes("changed since the run", changes)
    print_result(comparison, plan.steps, found, changes)
    return found
