"""`rl2 diff RUN RUN`: where two runs first part, and what else differs between them."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from rl2.config.key import schema_keys
from rl2.config.schema import PPOConfig
from rl2.report.saved import Record
from rl2.run.changes import Change
from rl2.tools.compare import ABSENT, Comparison, Difference, Run, flatten

# Of a launch in run.json. Older runs lack some.
FACTS = ("hosts", "cpu", "gpu", "threads", "world_size", "versions", "commit", "code")

SHOWN_STEPS = 4
UNRECORDED = (
    "Not recorded are files under the same name, such as a model; what the environment reads or "
    "asks; and what depends on time: rollout.partial, trainer.deterministic=false, kernels of a GPU"
)


def main() -> None:
    """Prints the comparison. Exit status 0: the same, 1: not, 2: they cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="rl2 diff",
        description="Says where two runs first part, and what differs in their configs, versions "
        "and data.",
    )
    parser.add_argument("runs", nargs=2, metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="numbers are equal if they differ by this much at most, or by this fraction of the "
        "larger one, e.g. 1e-3 for runs on GPUs; 0 by default",
    )
    arguments = parser.parse_args()
    try:
        first, second = map(Run, arguments.runs)
        found = report(Comparison(first, second, arguments.tolerance))
    except (OSError, ValueError) as error:
        parser.exit(2, f"rl2 diff: {error}\n")
    sys.exit(int(found is not None))


def report(comparison: Comparison) -> Difference | None:
    """Prints what differs and returns the first difference of the records."""
    first, second = comparison.runs
    steps = sorted(first.metrics.keys() & second.metrics.keys())
    if not steps:
        raise ValueError(
            f"no step is in both: {first.folder} has {describe_steps(first.metrics)}, "
            f"{second.folder} has {describe_steps(second.metrics)}"
        )
    found = comparison.find(steps)
    numbers, names = find_changes(first, second, found.step if found else steps[-1])
    print_changes("may change numbers", numbers)
    print_changes("names, places, logs", names)
    for run, other in ((first, second), (second, first)):
        if only := run.metrics.keys() - other.metrics.keys():
            print(f"only {run.folder} has {describe_steps(only)}")
        if run.num_broken:
            print(f"{run.folder}/metrics.jsonl: {run.num_broken} lines are cut or broken")
    print_result(comparison, steps, found, numbers)
    return found


def print_result(
    comparison: Comparison, steps: Iterable[int], found: Difference | None, numbers: list[Change]
) -> None:
    """Prints the first difference, or that the steps are the same."""
    if found:
        print(f"first difference: {found}")
        if not numbers:
            print(f"no recorded setting that may change numbers differs. {UNRECORDED}")
        return
    kinds = ", ".join(["metrics", *sorted(comparison.seen)])
    print(f"same: {describe_steps(steps)} (compared: {kinds})")


def print_changes(title: str, changes: list[Change]) -> None:
    if changes:
        print(f"{title}:", *changes, sep="\n  ")


def describe_steps(numbers: Iterable[int]) -> str:
    """Such as "step 1", "steps 1, 2, 3" and "steps 1, ..., 9"."""
    texts = [str(number) for number in sorted(numbers)]
    if len(texts) > SHOWN_STEPS:
        texts[1:-1] = ["..."]
    if len(texts) < 2:
        return f"step {texts[0]}" if texts else "no step"
    return f"steps {', '.join(texts)}"


def find_changes(first: Run, second: Run, step: int) -> tuple[list[Change], list[Change]]:
    """Returns what differs in the configs and in the launches that did the step.

    First what may change numbers, then the rest.
    """
    before, now = describe_run(first, step), describe_run(second, step)
    numbers: list[Change] = []
    names: list[Change] = []
    for name in {**before, **now}:
        old, new = before.get(name, ABSENT), now.get(name, ABSENT)
        is_unrecorded = name in FACTS and ABSENT in (old, new)
        if old == new or is_unrecorded or follows_leader(name, before, now):
            continue
        change = Change(name, f"{name}: {old} -> {new}")
        content = f"contents.{name}"
        has_same_content = content in before and before[content] == now.get(content)
        is_harmless = change.is_harmless or has_same_content
        (names if is_harmless else numbers).append(change)
    return numbers, names


def follows_leader(name: str, before: Record, now: Record) -> bool:
    """Returns whether the key changed like the key that gives it its value unless it is set."""
    known = schema_keys(PPOConfig)
    if name not in known or not known[name].leader:
        return False
    leader = known[name].leader
    has_followed = before.get(name) == before.get(leader)
    return has_followed and now.get(name) == now.get(leader)


def describe_run(run: Run, step: int) -> Record:
    """Dotted names and values of its config, and of run.json for the launch that did the step."""
    starts = [start for start in run.record.get("starts", []) if start["step"] < max(step, 1)]
    facts = {name: start[name] for start in starts[-1:] for name in FACTS if name in start}
    identity = run.record.get("identity", {"contents": {}})
    facts["contents"] = {name: digest[:12] for name, digest in identity["contents"].items()}
    facts["identity"] = {"trainer": identity.get("trainer")}
    known = flatten({**run.config, **facts}, is_deep=False)
    return {name: value for name, value in known if value != {}}
