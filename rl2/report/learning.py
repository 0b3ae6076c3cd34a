"""Whether SFT, DPO or a reward model learned anything, by the evaluations of the whole run."""

import re
from dataclasses import dataclass
from itertools import chain

from rl2.run.records import Record


@dataclass(frozen=True)
class Problem:
    """Something that went wrong in a step."""

    name: str  # completes "step 3 ..." and "4 steps ..."
    reason: str  # and what to do; one or two sentences


def find_lack_of_learning(lines: list[Record]) -> list[Problem]:
    """Finds what the evaluations of a whole run of SFT, DPO or a reward model say against it.

    `lines` are those of metrics.jsonl, with None for values that are not finite.
    """
    problems = []
    for name in dict.fromkeys(chain.from_iterable(lines)):
        # A part of PPO's reward may be called loss, too.
        match = re.fullmatch(r"test/(?:(?!reward/)[^/]+/)?(loss|accuracy)", name)
        if match is None:
            continue
        values = {line["step"]: line[name] for line in lines if line.get(name) is not None}
        if len(values) < 2:
            continue
        first, last = min(values), max(values)
        if match[1] == "loss" and values[last] >= values[first]:
            lowest = min(values, key=lambda step: (values[step], step))
            reason = (
                f"it was {values[first]:.5g} at step {first} and is {values[last]:.5g} at step "
                f"{last}"
            )
            remedy = "try another lr, more steps or more rows, and read some rows"
            if values[lowest] < values[first]:
                remedy = (
                    f"it was {values[lowest]:.5g} at step {lowest}: train fewer steps, or set "
                    "trainer.test_freq and trainer.save_best=auto, which keeps the best model"
                )
            problems.append(Problem(f"did not lower {name}", f"{reason}; {remedy}"))
        errors = {line["step"]: line.get(f"{name}_stderr") for line in lines}
        error = errors[last]
        if match[1] == "accuracy" and error is not None and values[last] - 0.5 <= error:
            reason = (
                f"at step {last} it is {values[last]:.3g}, with a standard error of {error:.2g}, "
                "and chance is 0.5: train longer, try another lr, or test on more pairs"
            )
            problems.append(Problem(f"did not raise {name} above chance", reason))
    return problems
