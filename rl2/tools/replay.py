"""`rl2 replay RUN --step N`: runs a recorded step again, and says where it first differs.

`rl2.tools.rerun` runs it, in processes of its own and in another folder. RUN is only read.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, product
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from rl2.report.answers import prompt_of
from rl2.report.saved import Record, read_lines, read_yaml
from rl2.run.records import read_object

PACKAGE = Path(__file__).parent.parent
# What differs from run to run. A warning may be about the cores of the machine.
TIMED = ("time/", "overlap/", "memory/", "resources/", "tokens/per_second", "warnings")
# Of a launch in run.json: what may change numbers.
FACTS = ("cpu", "gpu", "threads", "world_size", "versions", "commit", "code")
# What an answer is compared by, in the order in which a step makes it. It may lack some of it.
PARTS = (
    *("row", "prompt", "tokens", "messages", "finish_reason", "length"),
    *("rewards", "weights", "reward", "is_filtered", "trainer_logps", "advantages", "advantage"),
)
COLUMNS = {"tokens", "mask", "logps", "trainer_logps", "advantages"}  # of step_N.safetensors
SHOWN = 80  # characters of a value
# Kernels of GPUs may add in any order: numbers may differ by this much, or by this fraction, and
# the hash of the weights is not compared. No replay has been tried on a GPU.
GPU_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Rerun:
    """Which steps to run again, and from what. Paths are texts, so that JSON can hold them."""

    run: str  # folder of the recorded run
    out: str  # folder of the replay
    trainer: str  # the name of the config's class
    config: str  # folder with the config.yaml of the launch that did the steps
    checkpoint: str | None  # before the first step; None at the beginning of the run
    first_step: int
    last_step: int
    takes_saved: bool  # the tokens that the run saved; otherwise answers are sampled again

    @property
    def steps(self) -> range:
        return range(self.first_step, self.last_step + 1)


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
        "are taken (PPO only)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="a new folder for the records of the replay; by default they are deleted",
    )
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="rl2-replay-") as folder:
            out = (arguments.out or Path(folder)).resolve()
            found = replay(arguments.run.resolve(), arguments.step, arguments.rollouts, out)
    except (OSError, ValueError, RuntimeError) as error:
        parser.exit(2, f"rl2 replay: {error}\n")
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell tells of Ctrl-C
    sys.exit(int(bool(found)))


def replay(run: Path, step: int, rollouts: str, out: Path) -> str:
    """Runs the step again in the folder `out`. Prints and returns the first difference, if any.

    ValueError or RuntimeError if the step cannot be run again.
    """
    start = find_launch(run, step)
    rerun = make_rerun(run, step, rollouts, out)
    prepare(run, out)
    place = f"from {rerun.checkpoint}" if rerun.checkpoint else "from the beginning of the run"
    print(f"{describe_steps(rerun.steps)} of {run} again, {place}", flush=True)
    run_processes(make_command(rerun, start), start)
    return report(run, out, rerun.steps, has_gpu=bool(start.get("gpu")))


def read_metrics(run: Path) -> dict[int, Record]:
    """Returns the metrics of each step, by their dotted names."""
    lines, _ = read_lines(run / "metrics.jsonl")
    return {line["step"]: dict(flatten(line)) for line in lines if "step" in line}


def launch_of(record: Record, step: int) -> Record:
    """The launch that did the step, in run.json."""
    start: Record = [start for start in record["starts"] if start["step"] < step][-1]
    return start


def find_launch(run: Path, step: int) -> Record:
    """Returns the launch that did the step, from run.json. ValueError if it cannot be repeated."""
    record = read_object(run / "run.json")
    if not {"starts", "identity", "date"} <= record.keys():
        raise ValueError(f"{run} is not the folder of a run: run.json says how to run a step")
    recorded = sorted(number for number in read_metrics(run) if number > 0)
    if step not in recorded:
        raise ValueError(f"--step {step}: {run} has recorded {describe_steps(recorded)}")
    start = launch_of(record, step)
    if len(start["hosts"]) > 1:
        raise ValueError(
            f"{run} ran on {len(start['hosts'])} machines, and a replay runs on one: replay a run "
            "of one machine with the same layout"
        )
    return start


def make_rerun(run: Path, step: int, rollouts: str, out: Path) -> Rerun:
    """Plans the steps from the newest checkpoint on. ValueError if something of them is missing."""
    from rl2.run.checkpoints import Checkpoints  # torch takes seconds, and --help does not need it

    record = read_object(run / "run.json")
    checkpoints = Checkpoints(run / "checkpoints")
    steps = checkpoints.steps()
    first = max((saved for saved in steps if saved < step), default=0) + 1
    if first == 1 and 1 not in read_metrics(run):
        raise ValueError(
            f"{run} was resumed from a checkpoint of another run, and has none of its own "
            f"before step {step}: replay the other run, or a later step"
        )
    config = run
    if find_launch(run, step) != record["starts"][-1]:
        # A later launch has replaced the run's config.yaml; the next checkpoint has the old one.
        config = next((checkpoints.path(saved) for saved in steps if saved >= step), run)
    again = Rerun(
        run=str(run),
        out=str(out),
        trainer=record["identity"]["trainer"],
        config=str(config),
        checkpoint=str(checkpoints.path(first - 1)) if first > 1 else None,
        first_step=first,
        last_step=step,
        takes_saved=rollouts == "saved",
    )
    tokens = [run / f"rollouts/train/step_{number}.safetensors" for number in again.steps]
    if again.takes_saved and not all(path.exists() for path in tokens):
        raise ValueError(
            f"--rollouts saved: {run} has not the tokens of {describe_steps(again.steps)}, which "
            "trainer.save_tokens=true keeps; --rollouts again samples them again"
        )
    return again


def prepare(run: Path, out: Path) -> None:
    """Makes the folder of the replay. Its run.json has the date of the recorded run.

    ValueError if there is something in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty: give a new folder")
    date = read_object(run / "run.json")["date"]
    (out / "run.json").write_text(json.dumps({"date": date}))


def make_command(rerun: Rerun, start: Record) -> list[str]:
    """Returns the command that runs the steps, with as many processes as the launch `start` had."""
    command = [sys.executable]
    if start["world_size"] > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        command += [*torchrun, f"--nproc_per_node={start['world_size']}"]
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


def report(run: Path, again: Path, steps: range, has_gpu: bool) -> str:
    """Prints what has changed since the run, and the first difference. Returns this one, or ""."""
    if has_gpu:
        print(f"on a GPU: compared with a tolerance of {GPU_TOLERANCE}, without the weights' hash")
    found = find_difference(run, again, steps, GPU_TOLERANCE if has_gpu else None)
    changes = find_changes(run, again, steps[-1])
    if changes:
        print("changed since the run:", *changes, sep="\n  ")
    folder = again / f"rollouts/train/step_{steps[-1]}"
    kinds = {"answers": folder.with_suffix(".jsonl"), "tokens": folder.with_suffix(".safetensors")}
    compared = ["metrics", *(kind for kind, path in kinds.items() if path.exists())]
    if not has_gpu:
        compared.append("weights")
    same = f"same: {describe_steps(steps)} (compared: {', '.join(compared)})"
    print(f"first difference: {found}" if found else same)
    return found


def describe_steps(numbers: Iterable[int]) -> str:
    """Such as "step 1" and "steps 1 to 9"."""
    steps = list(numbers)
    if len(steps) > 1:
        return f"steps {steps[0]} to {steps[-1]}"
    return f"step {steps[0]}" if steps else "no step"


def find_changes(run: Path, again: Path, step: int) -> list[str]:
    """Returns what of the machine, the versions and the user's files is not as in the run."""
    before, now = describe_launch(run, step), describe_launch(again, step)
    names = [name for name in before if name in now and before[name] != now[name]]
    return [f"{name}: {before[name]} -> {now[name]}" for name in names]


def describe_launch(run: Path, step: int) -> Record:
    """Dotted names and values of run.json for the launch that did the step."""
    record = read_object(run / "run.json")
    start = launch_of(record, step)
    contents = record["identity"]["contents"]
    facts = {name: start[name] for name in FACTS if name in start}
    return dict(flatten({**facts, "contents": {name: contents[name][:12] for name in contents}}))


def find_difference(
    run: Path, again: Path, steps: Iterable[int], gpu_tolerance: float | None = None
) -> str:
    """Returns the first difference of a run and its replay in words; "" if there is none.

    Times and memory are not compared, and neither is what only one of the two has recorded. With
    `gpu_tolerance`, numbers are equal if they differ by it at most, or by this fraction of the
    larger one, and hashes of the weights are not compared.
    """
    left_out = TIMED if gpu_tolerance is None else (*TIMED, "weights")
    first, second = read_metrics(run), read_metrics(again)
    for step in steps:
        transcript = Path(f"rollouts/train/step_{step}.jsonl")
        places = answer_pairs(run / transcript, again / transcript)
        lines = [lines.get(step, {}) for lines in (first, second)]
        kept = [name for name in lines[0] if name in lines[1] and not name.startswith(left_out)]
        before, after = ({name: line[name] for name in kept} for line in lines)
        for place, old, new in chain(places, [("metrics.jsonl", before, after)]):
            for name in {**old, **new}:
                values = (old.get(name, "nothing"), new.get(name, "nothing"))
                if not are_equal(*values, gpu_tolerance or 0.0):
                    first_text, second_text = shorten(*map(partial(add_text, run, name), values))
                    return f"step {step}, {place}\n  {name}: {first_text} and {second_text}"
    return ""


def answer_pairs(run: Path, again: Path) -> Iterator[tuple[str, Record, Record]]:
    """Yields (place, recorded values, new values) of two transcripts of a step.

    First of all answers what a step makes first. Values that are equal may be left out.
    """
    first, second = read_answers(run), read_answers(again)
    place = "/".join(run.parts[-3:])
    yield place, {"ids of answers": list(first)}, {"ids of answers": list(second)}
    for part, number in product(PARTS, first):
        old, new = first[number], second[number]
        if part in old and part in new and old[part] != new[part]:
            group = [other for other in first if first[other]["group"] == old["group"]]
            where = f"group {old['group']}, answer {group.index(number)} of {place}"
            yield where, dict(flatten({part: old[part]})), dict(flatten({part: new[part]}))


def are_equal(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        is_close = math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
        return is_close or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def read_answers(path: Path) -> dict[int, Record]:
    """Returns the records of a step by their id, with prompts, and with tokens if they are kept."""
    records = {record["id"]: record for record in read_lines(path)[0]}
    for record in records.values():
        record["prompt"] = prompt_of(record)
    if not path.with_suffix(".safetensors").exists():
        return records
    columns = load_file(path.with_suffix(".safetensors"))
    owners = np.repeat(columns["trajectory"], columns["length"])
    for number, record in records.items():
        own = {name: columns[name][owners == number].tolist() for name in columns.keys() & COLUMNS}
        if any(own["mask"]):  # else it failed or was filtered out
            tokens = zip(own.pop("tokens"), own.pop("logps"), strict=True)
            record["tokens"] = [{"id": token, "logp": logp} for token, logp in tokens]
            record |= own
    return records


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of every value in nested objects and lists."""
    for name, value in enumerate(tree) if isinstance(tree, list) else tree.items():
        if isinstance(value, dict | list) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def add_text(run: Path, name: str, value: Any) -> str:
    """Returns the value; that of a token is followed by its text, if the tokenizer is here."""
    is_token = name.startswith("tokens.") and name.endswith(".id") and isinstance(value, int)
    tokenizer = find_tokenizer(run, read_yaml(run / "config.yaml") or {}) if is_token else None
    return f"{value} {tokenizer.decode([value])!r}" if tokenizer else str(value)


def find_tokenizer(folder: Path, config: Any) -> Any:
    """That of the final model of a run, or of its actor; None if neither is on this machine."""
    from transformers import AutoTokenizer  # slow to import, and few replays need it

    model = folder / "model"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return AutoTokenizer.from_pretrained(
            model if model.exists() else config["actor"]["model_name"],
            local_files_only=True,
            trust_remote_code=False,  # it would ask on the terminal
        )
    return None


def shorten(*texts: str) -> list[str]:
    """Returns the texts; long ones are cut around their first difference."""
    start = max(0, len(commonprefix(texts)) - SHOWN // 2)
    if max(map(len, texts)) <= SHOWN:
        return list(texts)
    return [f"{'...' if start else ''}{text[start : start + SHOWN]!r}" for text in texts]


if __name__ == "__main__":
    main()
