"""A queue of training runs that can be stopped and resumed.

Each finished run is one JSON line of a results file, with its date, machine and commit. A run whose
line is there is not repeated. Several processes may work on the same queue: each run is locked.
"""

import argparse
import contextlib
import fcntl
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "lab" / "results"
DTYPE = "bfloat16"  # of all results, also on a processor that is faster at float32


@dataclass(frozen=True)
class Job:
    """One run. `command` prints a JSON object on its last line: the result."""

    name: str  # unique in its results file
    command: list[str]


def run_missing(jobs: Iterable[Job], results_file: Path, folder: Path) -> None:
    """Runs the jobs that have no line in `results_file`, one after the other.

    The output of a run is in `folder`/NAME.log. A run that fails is named and left out; the next
    call tries it again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results_file.parent.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        with locked(folder / f"{job.name}.lock") as is_mine:
            if not is_mine or job.name in read_results(results_file):
                continue
            print(f"{time.strftime('%H:%M:%S')} {job.name}", flush=True)
            log = folder / f"{job.name}.log"
            with log.open("w") as output:
                done = subprocess.run(job.command, stdout=output, stderr=subprocess.STDOUT)
            if done.returncode != 0:
                print(f"  failed: {log}", flush=True)
                continue
            result = json.loads(log.read_text().splitlines()[-1])
            line = {"name": job.name, **result, **circumstances()}
            with results_file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def read_results(results_file: Path) -> dict[str, dict]:
    """The results by the name of their run."""
    if not results_file.exists():
        return {}
    return {line["name"]: line for line in read_rows(results_file)}


def circumstances() -> dict[str, str]:
    """When, on which machine and with which commit a result was made."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{processor()}, {platform.system()}",
        "commit": git.stdout.strip() or "unknown",
    }


def processor() -> str:
    """The model name of the processor, where the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Whether this process has the lock. The lock of a process that died is free."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def cpu_seconds_of(command: list[str], **options) -> float:
    """Runs a command. Returns the processor time of it and its children. Raises if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train_in(folder: Path, trainer: str, *keys: str) -> float:
    """Runs a trainer with `folder` as its run folder. Returns its CPU seconds."""
    command = [sys.executable, "-m", f"rl2.trainer.{trainer}", *keys]
    command += [f"trainer.save_dir={folder}", f"trainer.experiment_name={folder.name}"]
    command += ["trainer.resume=off", "trainer.disable_wandb=true"]
    return cpu_seconds_of(command, cwd=ROOT)


def make_parser(
    description: str, folder: Path
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, argparse.ArgumentParser]:
    """A parser with the commands `run`, `one` and `report`. Returns it, and those of the first two.

    `run` makes the runs that are missing, `one` makes one of them in this process, and `report`
    prints the tables. `folder` is where the runs are, unless --folder says otherwise.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="makes the runs that are missing")
    run.add_argument("--seeds", type=int, default=3)
    one = commands.add_parser("one", help="one run in this process")
    for command in (run, one):
        command.add_argument("--folder", type=Path, default=folder)
    commands.add_parser("report", help="prints the tables")
    return parser, run, one


def run_command(
    arguments: argparse.Namespace,
    results_file: Path,
    make_jobs: Callable[[argparse.Namespace], list[Job]],
    run_one: Callable[[argparse.Namespace], dict],
    report: Callable[[], None],
) -> None:
    """Does what a command of `make_parser` asks for. `folder` and, if there is one, `model` are
    absolute paths then.

    A run has one thread unless OMP_NUM_THREADS is set.
    """
    if arguments.command == "report":
        report()
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.path.insert(0, str(ROOT))
    arguments.folder = arguments.folder.absolute()
    if "model" in arguments:
        arguments.model = str(Path(arguments.model).absolute())
    if arguments.command == "one":
        print(json.dumps(run_one(arguments)))
    else:
        run_missing(make_jobs(arguments), results_file, arguments.folder)


def make_job(arguments: argparse.Namespace, name: str, *words: object) -> Job:
    """A job of the current script: its command `one` with `words`, in the folder of `arguments`."""
    command = [sys.executable, sys.argv[0], "one", *map(str, words)]
    return Job(name, [*command, "--folder", str(arguments.folder)])


def mean_and_error(values: list[float]) -> str:
    """Mean and standard error of the mean, as percentages: 81.3 ± 2.0."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{100 * mean:.1f}"
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return f"{100 * mean:.1f} ± {100 * (variance / len(values)) ** 0.5:.1f}"
