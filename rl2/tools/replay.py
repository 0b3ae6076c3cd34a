"""`rl2 replay RUN --step N`: runs a recorded step again, and says where it first differs.

It is a job like the recorded one, with as many processes, in another folder. It leaves out what
changes no weights: evaluations, checkpoints, exports, services. RUN is only read.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import product
from os.path import commonprefix
from pathlib import Path
from typing import Any

from rl2.parallel.rank import is_first_rank
from rl2.run.records import Record, read_lines, read_object

# What differs from run to run. A warning may be about the cores of the machine.
TIMED = ("time/", "memory/", "tokens/per_second", "warnings")
# Of a launch in run.json: what may change numbers.
FACTS = ("cpu", "gpu", "threads", "commit", "code")
# What an answer is compared by, in the order in which a step makes it. It may lack some of it.
PARTS = (
    "row",
    "messages",
    "finish_reason",
    "length",
    "rewards",
    "weights",
    "reward",
    "is_filtered",
    "advantage",
)
NOTHING = "nothing"  # where only one of the two has a value
SHOWN = 80  # characters of a value


def main() -> None:
    """Prints the comparison. Exit status 0: the same, 1: not, 2: the step cannot be run again.

    All processes of the job must call.
    """
    parser = argparse.ArgumentParser(
        prog="rl2 replay",
        description="Runs a recorded step again, from the checkpoint before it, and says whether "
        "rollouts, rewards, advantages, metrics and weights are those that were recorded. A run of "
        "several processes is replayed by `torchrun --nproc_per_node=N -m rl2 replay RUN ...`.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run; it is only read")
    parser.add_argument("--step", type=int, required=True, help="the step, 1 or more")
    about = "a new folder for the records of the replay; by default a temporary one"
    parser.add_argument("--out", type=Path, help=about)
    arguments = parser.parse_args()
    try:
        found = replay(arguments.run.resolve(), arguments.step, arguments.out)
    except (OSError, ValueError, RuntimeError) as error:
        parser.exit(2, f"rl2 replay: {error}\n" if is_first_rank() else "")
    sys.exit(int(bool(found)))


def replay(run: Path, step: int, out: Path | None) -> str:
    """Runs the step again in the folder `out`. Prints and returns the first difference, if any.

    ValueError or RuntimeError if it cannot be run again. Other processes than the first return "".
    """
    import torch  # it takes seconds, and --help does not need it

    from rl2.run.checkpoints import Checkpoints

    launch = find_launch(run, step)
    check_processes(run, step, launch, out)
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoint = checkpoints.newest(before=step)
    first = int(checkpoint.name.removeprefix("step_")) + 1 if checkpoint else 1
    if first == 1 and 1 not in read_metrics(run):
        raise ValueError(
            f"{run} was resumed from a checkpoint of another run, and has none of its own "
            f"before step {step}: replay the other run, or a later step"
        )
    out = (out or Path(tempfile.mkdtemp(prefix="rl2-replay-"))).resolve()
    if is_first_rank():
        prepare(run, out)
        place = checkpoint or "the beginning of the run"
        print(f"steps {first} to {step} of {run} again, from {place}, in {out}", flush=True)
    folder = launch.get("folder", "")  # where the paths of its config begin
    if os.path.isdir(folder):
        os.chdir(folder)
        sys.path.insert(0, folder)
    torch.set_num_threads(launch.get("threads") or torch.get_num_threads())
    # A later launch may have replaced the config.yaml of the run; checkpoints keep theirs.
    later = [saved for saved in checkpoints.steps() if saved >= step]
    run_until(step, checkpoints.path(later[0]) if later else run, checkpoint, out)
    if not is_first_rank():
        return ""
    if step not in read_metrics(out):
        raise RuntimeError(f"it was stopped before the end of step {step}")
    return report(run, out, range(first, step + 1))


def read_metrics(run: Path) -> dict[int, Record]:
    """Returns the metrics of each step."""
    lines, _ = read_lines(run / "metrics.jsonl")
    return {line["step"]: line for line in lines if "step" in line}


def find_launch(run: Path, step: int) -> Record:
    """Returns the launch that did the step, of run.json. ValueError if nothing says how."""
    record = read_object(run / "run.json")
    if not {"starts", "identity", "date"} <= record.keys():
        raise ValueError(f"{run} is not the folder of a run: run.json says how to run a step")
    steps = [number for number in read_metrics(run) if number > 0]
    if step not in steps:
        recorded = f"steps {min(steps)} to {max(steps)}" if steps else "no step"
        raise ValueError(f"--step {step}: {run} has recorded {recorded}")
    launch: Record = [start for start in record["starts"] if start["step"] < step][-1]
    return launch


def check_processes(run: Path, step: int, launch: Record, out: Path | None) -> None:
    """ValueError unless the job has as many processes as the run had, and a folder that all see."""
    number = launch["world_size"]
    command = f"rl2 replay {run} --step {step}"
    if number > 1:
        command = f"torchrun --nproc_per_node={number} -m {command} --out FOLDER"
    is_alike = os.environ.get("WORLD_SIZE", "1") == str(number)
    if not is_alike or (number > 1 and out is None):
        raise ValueError(f"{run} ran as {number} processes: start `{command}`")


def prepare(run: Path, out: Path) -> None:
    """Makes the folder of the replay. Its run.json has the date of the recorded run.

    ValueError if there is something in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty: give a new folder")
    date = read_object(run / "run.json")["date"]
    (out / "run.json").write_text(json.dumps({"date": date}))


def run_until(step: int, source: Path, checkpoint: Path | None, out: Path) -> None:
    """Trains as the run or checkpoint in the folder `source` did.

    SystemExit with status 2 if it fails, which it says.
    """
    import torch.distributed as dist

    from rl2.config.conditions import count_samplers
    from rl2.config.parse import parse
    from rl2.config.schema import TRAINER_CONFIGS, worker_names
    from rl2.parallel.worlds import is_sampler
    from rl2.run.signals import guard
    from rl2.trainer.ppo_run import PPORun, SamplerRun

    kind = read_object(source / "run.json")["identity"]["trainer"]
    [command] = [name for name, root in TRAINER_CONFIGS.items() if root.__name__ == kind]
    trainer: Any = importlib.import_module(f"rl2.trainer.{command}")
    words = ["--config-dir", str(source), "--config-name", "config.yaml"]
    config: Any = parse(TRAINER_CONFIGS[command], words)
    config.trainer.save_dir = str(out)
    config.trainer.resume = str(checkpoint or "auto")
    config.trainer.save_freq = None
    config.trainer.loggers = []
    for name in worker_names(config):
        section = getattr(config, name)
        section.save_dir = section.save_freq = None
    try:
        with guard(config.trainer.watchdog):
            if is_sampler(count_samplers(config)):
                SamplerRun(config).run()
                return
            make_run = PPORun if command == "ppo" else trainer.make_run
            job: Any = make_run(config)
            job.recorder.evaluate = None
            job.recorder.num_steps = step  # schedules are those of the whole run
            trainer.train(job)
            if command == "ppo":
                job.sampling.close()
            dist.destroy_process_group()
    except SystemExit as error:
        sys.exit(2 if error.code else 0)


def report(run: Path, again: Path, steps: range) -> str:
    """Prints what has changed since the run, and the first difference. Returns this one, or ""."""
    found = find_difference(run, again, steps)
    before, now = describe_launch(run, steps[-1]), describe_launch(again, steps[-1])
    names = [name for name in before if name in now and before[name] != now[name]]
    if names:
        print("changed since the run:")
    for name in names:
        print(f"  {name}: {before[name]} -> {now[name]}")
    print(f"first difference: {found}" if found else f"same: steps {steps[0]} to {steps[-1]}")
    return found


def describe_launch(run: Path, step: int) -> Record:
    """What may change numbers of the launch that did the step: its facts, by their names."""
    launch = find_launch(run, step)
    facts = {name: launch.get(name) for name in FACTS}
    facts |= {f"versions.{name}": text for name, text in launch.get("versions", {}).items()}
    contents = read_object(run / "run.json")["identity"]["contents"]
    return facts | {f"contents.{name}": text[:12] for name, text in contents.items()}


def find_difference(run: Path, again: Path, steps: Iterable[int]) -> str:
    """Returns the first difference of a run and its replay in words; "" if there is none.

    Times and memory are not compared, and neither is what only one of the two has recorded.
    """
    first, second = read_metrics(run), read_metrics(again)
    for step in steps:
        transcript = Path(f"rollouts/train/step_{step}.jsonl")
        pairs = list(pair_answers(run / transcript, again / transcript))
        old, new = first.get(step, {}), second.get(step, {})
        for name in old:
            if name in new and not name.startswith(TIMED):
                pairs.append(("metrics.jsonl", name, old[name], new[name]))
        for place, name, a, b in pairs:
            if found := compare_values(name, a, b):
                return f"step {step}, {place}\n  {found}"
    return ""


def pair_answers(run: Path, again: Path) -> Iterator[tuple[str, str, object, object]]:
    """Yields (place, name, recorded value, new value) of two transcripts of a step.

    First of all answers what a step makes first.
    """
    first = {record["id"]: record for record in read_lines(run)[0]}
    second = {record["id"]: record for record in read_lines(again)[0]}
    place = "/".join(run.parts[-3:])
    yield place, "ids of answers", list(first), list(second)
    for part, number in product(PARTS, [number for number in first if number in second]):
        old, new = first[number], second[number]
        if part in old and part in new:
            yield f"answer {number} of {place}", part, old[part], new[part]


def compare_values(name: str, old: object, new: object) -> str:
    """Returns the dotted name of the first part that differs, and both values; "" if none does."""
    if isinstance(old, list) and isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            a, b = old.get(key, NOTHING), new.get(key, NOTHING)
            if found := compare_values(f"{name}.{key}", a, b):
                return found
        return ""
    is_nan = old != old and new != new  # noqa: PLR0124
    return "" if old == new or is_nan else f"{name}: {show_both(str(old), str(new))}"


def show_both(old: str, new: str) -> str:
    """Returns both texts; long ones are cut around their first difference."""
    start = max(0, len(commonprefix([old, new])) - SHOWN // 2)
    if max(len(old), len(new)) <= SHOWN:
        return f"{old} and {new}"
    return " and ".join(repr(text[start : start + SHOWN]) for text in (old, new))


if __name__ == "__main__":
    main()
