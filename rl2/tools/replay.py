"""`rl2 replay RUN --step N`: runs a recorded step again, and compares it with the record.

`rl2.tools.rerun` runs it, in processes of its own and in another folder. RUN is only read.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rl2.report.saved import Record
from rl2.run.checkpoints import Checkpoints
from rl2.tools.compare import Comparison, Difference, Run
from rl2.tools.diff import describe_steps, find_changes, print_changes, print_result
from rl2.tools.options import replay_parser
from rl2.tools.rerun import Rerun

PACKAGE = Path(__file__).parent.parent
# Kernels of GPUs may add in any order: numbers may differ by this much, or by this fraction, and
# the hash of the weights is not compared. No replay has been tried on a GPU.
GPU_TOLERANCE = 1e-2


def main() -> None:
    """Prints the comparison. Exit status 0: the same, 1: not, 2: the step cannot be run again."""
    parser = replay_parser()
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
    start = find_launch(run, step)
    rerun = make_rerun(run, step, rollouts, out)
    if rerun.takes_saved:
        check_tokens(run, rerun.steps)
    prepare(out, run)
    command = make_command(rerun, start)
    if len(start["hosts"]) > 1:
        raise ValueError(
            f"{folder} ran on {len(start['hosts'])} machines, and this command starts "
            "processes on one. With --out, a folder that all of them see, start this on each, with "
            f"HOST the name of the first:\n  {shlex.join(command)}\n"
            f"and then compare:\n  rl2 diff {folder} {out}"
        )
    place = f"from {rerun.checkpoint}" if rerun.checkpoint else "from the beginning of the run"
    print(f"{describe_steps(rerun.steps)} of {folder} again, {place}", flush=True)
    run_processes(command, start)
    return report(run, Run(out), rerun.steps, has_gpu=bool(start.get("gpu")))


def find_launch(run: Run, step: int) -> Record:
    """Returns the launch that did the step, from run.json. ValueError if there is none."""
    if not {"starts", "identity", "date"} <= run.record.keys():
        raise ValueError(f"{run.folder}/run.json is missing or broken: it says how to run a step")
    recorded = [number for number in run.metrics if number > 0]
    if step not in recorded:
        raise ValueError(f"--step {step}: {run.folder} has recorded {describe_steps(recorded)}")
    return [start for start in run.record["starts"] if start["step"] < step][-1]


def make_rerun(run: Run, step: int, rollouts: str, out: Path) -> Rerun:
    """Plans the steps from the newest checkpoint on. ValueError if there is none to start from."""
    checkpoints = Checkpoints(run.folder / "checkpoints")
    checkpoint = checkpoints.newest(before=step)
    if checkpoint is None and min(number for number in run.metrics if number > 0) > 1:
        raise ValueError(
            f"{run.folder} was resumed from a checkpoint of another run, and has none of its own "
            f"before step {step}: replay the other run, or a later step"
        )
    config = run.folder
    if find_launch(run, step) != run.record["starts"][-1]:
        # A later launch has replaced the run's config.yaml; the next checkpoint has the old one.
        later = [checkpoints.path(saved) for saved in checkpoints.steps() if saved >= step]
        config = [*later, run.folder][0]
    return Rerun(
        run=str(run.folder),
        out=str(out),
        trainer=run.record["identity"]["trainer"],
        config=str(config),
        checkpoint=str(checkpoint) if checkpoint else None,
        last_step=step,
        takes_saved=rollouts == "saved",
    )


def check_tokens(run: Run, steps: range) -> None:
    """ValueError unless the run has the tokens of these steps."""
    missing = [step for step in steps if len(run.rollout_files("train", step)) < 2]
    if missing:
        raise ValueError(
            f"--rollouts saved: {run.folder} has no tokens of {describe_steps(missing)}, which "
            "trainer.save_tokens=true keeps; --rollouts again samples them again"
        )


def prepare(out: Path, run: Run) -> None:
    """Makes the folder of the replay. Its run.json has the date of the recorded run.

    ValueError if there is something in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty: give a new folder")
    (out / "run.json").write_text(json.dumps({"date": run.record["date"]}))


def make_command(rerun: Rerun, start: Record) -> list[str]:
    """Returns the command that runs the steps, with as many processes as the launch `start` had."""
    num_nodes, world_size = len(start["hosts"]), start["world_size"]
    command = [sys.executable]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={world_size // num_nodes}"]
        where = ["--rdzv_backend=c10d", "--rdzv_endpoint=HOST:29500", f"--nnodes={num_nodes}"]
        command += where if num_nodes > 1 else ["--standalone"]
    return [*command, "-m", "rl2.tools.rerun", json.dumps(asdict(rerun))]


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


def report(run: Run, again: Run, steps: range, has_gpu: bool) -> Difference | None:
    """Prints what has changed since the run, and the first difference. Returns this one."""
    tolerance = 0.0
    if has_gpu:
        tolerance = GPU_TOLERANCE
        for line in run.metrics.values():
            for name in [name for name in line if name.startswith("weights")]:
                del line[name]
        print(f"on a GPU: compared with a tolerance of {tolerance}, without the weights' hash")
    comparison = Comparison(run, again, tolerance)
    found = comparison.find(steps)
    changes, _ = find_changes(run, again, found.step if found else steps[-1])
    print_changes("changed since the run", changes)
    print_result(comparison, steps, found, changes)
    return found
