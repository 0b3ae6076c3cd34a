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
from pathlib import Path

import psutil
from parts import PARTS, Part

from rl2.config.engines import installed_version

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SKIPPED = 77  # the exit status of a skipped part
DRY_PATIENCE = 3  # a CPU gets so many times the limit of a part
SECONDS_TO_END = 10  # for processes that a part leaves
TAIL_BYTES = 1500  # of a failed part's log, which are printed


@dataclass
class Outcome:
    name: str
    result: str  # passed | failed | timed out | skipped
    seconds: float
    figures: dict
    reason: str = ""

    def row(self) -> str:
        figures = ", ".join(f"{key} {value}" for key, value in self.figures.items())
        text = "; ".join(filter(None, (self.reason.replace("|", "/").replace("\n", " "), figures)))
        return f"| {self.name} | {self.result} | {self.seconds:.0f} | {text} |"


def run_part(name: str, part: Part, limit: float, log) -> Outcome:
    """Runs one part in its own process and returns its outcome. `limit` is in seconds.

    On return, no process of the part is left.
    """
    start, mark = time.monotonic(), uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        figures_file = Path(folder, "figures.jsonl")
        figures_file.touch()
        function = [str(HERE / part.file), part.function or name, json.dumps(part.arguments)]
        command = [sys.executable, str(HERE / "part.py"), *function, str(figures_file), str(limit)]
        env = os.environ | {"RL2_GPU_MARK": mark}
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            process.kill()
            process.wait()
        left = _end(mark, 0 if status is None else SECONDS_TO_END)
        figures = {}
        for line in figures_file.read_text().splitlines():
            figures |= json.loads(line)
    reason = figures.pop("reason", "")
    seconds = time.monotonic() - start
    if status is None:
        return Outcome(name, "timed out", seconds, figures, f"more than {limit:.0f} s")
    if status == 0 and left:
        status, reason = 1, f"processes were left: {', '.join(left)}"
    if status not in (0, SKIPPED) and not reason:
        reason = f"the process ended with {status}"
    result = {0: "passed", SKIPPED: "skipped"}.get(status, "failed")
    return Outcome(name, result, seconds, figures, reason)


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
    return [
        process
        for process in psutil.process_iter(["environ", "status"])  # None where it may not be read
        if (process.info["environ"] or {}).get("RL2_GPU_MARK") == mark
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def run_parts(parts: dict[str, Part], file: Path, header: str, patience: int) -> list[Outcome]:
    """Runs all parts and returns their outcomes. A part that fails stops only those that need it.

    `file` receives each outcome as soon as its part ends. `patience` is a factor on the limit of
    each part.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(header + "\n| part | result | seconds | |\n|---|---|---|---|\n")
    outcomes: list[Outcome] = []
    with open(file.with_suffix(".log"), "w") as log:
        for name, part in parts.items():
            log.write(f"\n===== {name}\n")
            log.flush()
            failed = {o.name: o.result for o in outcomes if o.result != "passed"}
            if need := next((need for need in part.needs if need in failed), None):
                was = "was " * (failed[need] == "skipped")
                outcome = Outcome(
                    name, "skipped", 0, {}, f"needs {need}, which {was}{failed[need]}"
                )
            else:
                print(f"{name} ...", flush=True)
                outcome = run_part(name, part, part.limit * patience, log)
            if outcome.result in ("failed", "timed out"):
                print(_log_end(Path(log.name), name), flush=True)
            outcomes.append(outcome)
            print(outcome.row(), flush=True)
            with open(file, "a") as table:
                table.write(outcome.row() + "\n")
                table.flush()
                os.fsync(table.fileno())
    return outcomes


def _log_end(log: Path, name: str) -> str:
    """The last lines that the part `name`, which ran last, wrote to the log."""
    text = log.read_text(errors="replace").rpartition(f"\n===== {name}\n")[2]
    return "\n".join(f"    {line}" for line in text[-TAIL_BYTES:].splitlines())


def describe(dry: bool) -> str:
    """Returns the header of the results: date, device, versions, commit."""
    packages = ("torch", "transformers", "sglang", "vllm", "triton")
    versions = ", ".join(f"{name} {installed_version(name)}" for name in packages)
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    device = "a CPU, tiny shapes (a dry run)" if dry else "a GPU"
    return (
        f"# `bash tests/gpu/run.sh`, {datetime.now():%Y-%m-%d %H:%M}\n\n"
        f"{device}; Python {sys.version.split()[0]}, {versions}; commit {commit}\n"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What needs a GPU; see tests/gpu/run.sh.")
    parser.add_argument("parts", nargs="*", help="which ones; all without")
    parser.add_argument("--list", action="store_true", help="names and limits, in seconds")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the result file"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return arguments


def has_gpu() -> bool:
    """Whether torch can use a GPU. Prints why not."""
    import torch

    from rl2.parallel.mesh import check_gpu

    try:
        check_gpu()
    except RuntimeError as error:
        print(f"tests/gpu: {error}")
        return False
    if not torch.cuda.device_count():
        print("tests/gpu: there is no GPU here; RL2_DEVICE=cpu tries the parts on a CPU")
        return False
    return True


def main() -> int:
    arguments = parse_arguments()
    if arguments.list:
        print("\n".join(f"{name:18} {part.limit:4} s" for name, part in PARTS.items()))
        return 0
    dry = os.environ.get("RL2_DEVICE") == "cpu"
    if dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not has_gpu():
        return 3
    names = arguments.parts or PARTS
    wanted = {name: part for name, part in PARTS.items() if name in names}
    name = f"gpu-{datetime.now().strftime('%Y-%m-%d-%H%M%S')}" + ("-dry" if dry else "")
    header, file = describe(dry), arguments.out / f"{name}.md"
    print(header, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        models = Path(os.environ.setdefault("RL2_GPU_MODELS", temporary))
        models.mkdir(parents=True, exist_ok=True)
        patience = DRY_PATIENCE if dry else 1
        outcomes = run_parts(wanted, file, header, patience)
    print(
        f"{sum(o.result == 'passed' for o in outcomes)} of {len(outcomes)} passed; "
        f"written to {file}"
    )
    return int(any(o.result in ("failed", "timed out") for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
