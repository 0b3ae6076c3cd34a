"""Runs each part in its own process; see run.sh."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SKIPPED = 77  # the exit status of a skipped part
LEAST = 20  # seconds; no part starts with less time left


@dataclass
class Part:
    file: str  # in the folder of this file
    limit: int  # seconds


# The most important parts come first, because the machine may be taken away.
PARTS = {
    "device": Part("operators.py", 120),
    "attention": Part("operators.py", 180),
    "head": Part("operators.py", 120),
    "worker": Part("training.py", 180),
    "offload": Part("training.py", 180),
    "local_contract": Part("engines.py", 180),
    "local_throughput": Part("engines.py", 240),
    "sglang_contract": Part("engines.py", 300),
    "sglang_agreement": Part("engines.py", 400),
    "sglang_sync": Part("engines.py", 400),
    "sglang_memory": Part("engines.py", 400),
    "sglang_throughput": Part("engines.py", 500),
    "sglang_grpo": Part("runs.py", 600),
    "utilisation_8k": Part("training.py", 300),
    "utilisation_32k": Part("training.py", 300),
    "local_grpo": Part("runs.py", 400),
    "ring": Part("runs.py", 300),
    "memory_7b": Part("training.py", 600),
}


@dataclass
class Outcome:
    name: str
    result: str  # passed | failed | timed out | skipped | not run
    seconds: float
    figures: dict
    reason: str = ""

    def row(self) -> str:
        figures = ", ".join(f"{key} {value}" for key, value in self.figures.items())
        told = "; ".join(filter(None, (self.reason.replace("|", "/").replace("\n", " "), figures)))
        return f"| {self.name} | {self.result} | {self.seconds:.0f} | {told} |"


def run_part(name: str, path: Path, limit: float, log) -> Outcome:
    """Runs one part in its own process and returns its outcome. `limit` is in seconds.

    On return, no process of the part is left.
    """
    start, mark = time.monotonic(), uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "figures.jsonl")
        command = [sys.executable, str(HERE / "part.py"), str(path), name, str(told)]
        env = {**os.environ, "RL2_GPU_MARK": mark}
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        left = _end(mark, 0 if status is None else 10)
        child.wait()
        lines = told.read_text().splitlines() if told.exists() else []
    found = {}
    for line in lines:
        found |= json.loads(line)
    reason = found.pop("reason", "")
    if status is None:
        return Outcome(
            name, "timed out", time.monotonic() - start, found, f"more than {limit:.0f} s"
        )
    if status == 0 and left:
        status, reason = 1, f"processes were left: {', '.join(left)}"
    if status not in (0, SKIPPED) and not reason:
        reason = f"the process ended with {status}"
    result = {0: "passed", SKIPPED: "skipped"}.get(status, "failed")
    return Outcome(name, result, time.monotonic() - start, found, reason)


def _end(mark: str, patience: float) -> list[str]:
    """Waits `patience` seconds for the processes with `mark` in their environment, then kills them.

    Returns the command lines of the killed processes.
    """
    ends = time.monotonic() + patience
    while (alive := _marked(mark)) and time.monotonic() < ends:
        time.sleep(0.2)
    names = []
    for process in alive:
        try:
            words = process.cmdline()
            names.append(" ".join([Path(word).name for word in words[:1]] + words[1:])[:80])
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(alive, timeout=30)
    return names


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("RL2_GPU_MARK") == mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):
            pass
    return found


def run_parts(
    parts: dict[str, Part], file: Path, header: str, budget: float = float("inf"), patience: int = 1
):
    """Runs all parts and returns their outcomes. A part that fails does not stop the others.

    `file` receives each outcome as soon as its part ends. `budget` is the limit for all parts, in
    seconds. `patience` is a factor on the limit of each part.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(header + "\n| part | result | seconds | |\n|---|---|---|---|\n")
    ends, outcomes = time.monotonic() + budget, []
    with open(file.with_suffix(".log"), "w") as log:
        for name, part in parts.items():
            left = ends - time.monotonic()
            if left < LEAST:
                outcome = Outcome(name, "not run", 0, {}, "no time was left")
            else:
                print(f"{name} ...", flush=True)
                log.write(f"\n===== {name}\n")
                log.flush()
                outcome = run_part(name, HERE / part.file, min(part.limit * patience, left), log)
            outcomes.append(outcome)
            print(outcome.row(), flush=True)
            with open(file, "a") as told:
                told.write(outcome.row() + "\n")
                told.flush()
                os.fsync(told.fileno())
    return outcomes


def describe(dry: bool) -> str:
    """Returns the header of the results: date, device, versions, commit."""
    import torch

    told = []
    for package in ("torch", "transformers", "sglang", "triton"):
        try:
            told.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            told.append(f"no {package}")
    device = "a CPU, tiny shapes (a dry run)"
    if not dry:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        device = f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}"
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    commit = f"; commit {git.stdout.strip()}" if git.returncode == 0 else ""
    now = datetime.now().strftime("%Y-%m-%d %H:%M")
    return (
        f"# `bash tests/gpu/run.sh`, {now}\n\n"
        f"{device}; Python {sys.version.split()[0]}, {', '.join(told)}{commit}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="What needs a GPU; see tests/gpu/run.sh.")
    parser.add_argument("parts", nargs="*", help="which ones; all without")
    parser.add_argument("--list", action="store_true", help="names and limits, in seconds")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the result file"
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds that all of it may take"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if arguments.list:
        print("\n".join(f"{name:18} {part.limit:4} s" for name, part in PARTS.items()))
        return 0
    dry = os.environ.get("RL2_DEVICE") == "cpu"
    if dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if not dry and not torch.cuda.is_available():
        print(
            "tests/gpu: there is no GPU here, so nothing was run (RL2_DEVICE=cpu tries the "
            "parts on a CPU)"
        )
        return 3
    wanted = {
        name: part for name, part in PARTS.items() if name in arguments.parts or not arguments.parts
    }
    name = f"gpu-{datetime.now().strftime('%Y-%m-%d-%H%M%S')}" + ("-dry" if dry else "")
    header, file = describe(dry), arguments.out / f"{name}.md"
    print(header)
    with tempfile.TemporaryDirectory() as models:
        os.environ["RL2_GPU_MODELS"] = models  # each model is created once and shared by the parts
        outcomes = run_parts(wanted, file, header, arguments.budget, patience=3 if dry else 1)
    print(
        "\n"
        + "\n".join(f"{o.name:18} {o.result:9} {o.seconds:5.0f} s  {o.reason}" for o in outcomes)
    )
    print(
        f"{sum(o.result == 'passed' for o in outcomes)} of {len(outcomes)} passed; "
        f"written to {file}"
    )
    return int(any(o.result in ("failed", "timed out") for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
