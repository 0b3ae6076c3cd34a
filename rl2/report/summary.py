"""What a report says first: a run in a few sentences, and the metrics that show its result."""

import math
import re
from datetime import timedelta
from typing import Any

from rl2.report.saved import Record
from rl2.run.success import REWARD, saved_score, training_metric

TRAINERS = {  # by the class of the config
    "PPOConfig": "with reinforcement learning",
    "SFTConfig": "with SFT",
    "DPOConfig": "with DPO",
    "RMConfig": "as a reward model",
}
HELD_OUT = {  # patterns of metrics after test/ or test/NAME/
    r"reward/mean": "mean reward",
    r"avg@\d+": "share of right answers",
    r"loss": "loss",
    r"accuracy": "accuracy",
}
MAX_HEADLINES = 6  # with more test sets, the others are among the curves
CONFIDENCE = 1.96  # standard errors: 95%


def summarize(
    lines: list[Record], config: Record | None, record: Record | None
) -> tuple[list[str], dict[str, str]]:
    """Returns the summary of a run: sentences, and the names of the metrics to show large.

    `lines` are those of metrics.jsonl in the order of their steps. `config` and `record` are the
    contents of config.yaml and run.json.
    """
    config, record = config or {}, record or {}
    score = saved_score(config)
    held_out = _find_held_out(lines, score)
    found = _find_trained(lines, score) | held_out
    headlines = dict(list(found.items())[:MAX_HEADLINES])
    sentences = [_describe_training(lines, config, record)]
    sentences += [_describe_change(lines, name, label) for name, label in headlines.items()]
    best = record.get("best")
    if best:
        sentences.append(
            f"The best {best['metric']} was {best['value']:.3g}, at step {best['step']:,}; "
            "best_model/ has its model."
        )
    if lines and not held_out:
        sentences.append("No held-out rows were evaluated.")
    elif len(found) > len(headlines):
        sentences.append("Results of more test sets are among the curves.")
    return sentences, headlines


def _values(lines: list[Record], name: str) -> dict[int, float]:
    """Returns the metric by step, of the lines that have it."""
    values = {line["step"]: line.get(name) for line in lines}
    return {
        step: value for step, value in values.items() if value is not None and math.isfinite(value)
    }


def _find_trained(lines: list[Record], score: str | None) -> dict[str, str]:
    """Returns the metric that training is about, and what a person calls it; {} without any."""
    trained = [line for line in lines if line["step"] > 0]
    labels = {
        training_metric(score): f"mean {score or 'reward'} in training",
        REWARD: "mean reward in training",
        "actor/loss": "training loss",
        "critic/loss": "training loss",
    }
    for name, label in labels.items():
        if _values(trained, name):
            return {name: label}
    return {}


def _find_held_out(lines: list[Record], score: str | None) -> dict[str, str]:
    """Returns the metrics that tell the result on held-out rows, and what a person calls them.

    `score` is rollout.score. If it is not the whole reward, that does not tell the result.
    """
    names = {name: None for line in lines for name in line}
    found = {}
    for pattern, label in HELD_OUT.items():
        if score is not None and pattern == REWARD:
            continue
        for name in names:
            match = re.fullmatch(rf"test/(?:([^/]+)/)?{pattern}", name)
            values = _values(lines, name).values() if match else []
            # No answer is ever right where rewards do not say what is right.
            is_told = any(values) if "avg@" in name and score is None else bool(values)
            if match and is_told:
                found[name] = f"held-out {label} of {match[1]}" if match[1] else f"held-out {label}"
    return found


def _describe_training(lines: list[Record], config: Record, record: Record) -> str:
    """Says which model was trained, how, for how many steps and how long."""
    model = _value(config, "actor", "model_name") or _value(config, "critic", "model_name")
    model = model or "A model"
    num_done = max((line["step"] for line in lines), default=0)
    seconds = round(sum(_values(lines, "time/step").values()))
    lasting = f" in {timedelta(seconds=seconds)}" if seconds else ""
    if num_done == 0:
        if _value(config, "trainer", "eval_only") and lines:
            return f"{model} was evaluated{lasting}, without training."
        return f"{model}: no step of training is finished yet."
    trainer = _value(record, "identity", "trainer")
    how = f" {TRAINERS[trainer]}" if trainer in TRAINERS else ""
    start = (record.get("starts") or [{}])[-1]
    presets = [word for word in start.get("command") or [] if word.startswith("algo=")]
    if trainer == "PPOConfig" and "adv" in config:
        estimator, loss = _value(config, "adv", "estimator"), _value(config, "actor", "loss")
        keys = f"adv.estimator={estimator}, actor.loss={loss}"
        how += f" ({', '.join([*presets[-1:], keys])})"
    num_steps = max(start.get("num_steps") or 0, num_done)
    steps = f"{num_done:,} of {num_steps:,}" if num_done < num_steps else f"{num_done:,}"
    noun = "step" if steps == "1" else "steps"
    return f"{model} was trained{how} for {steps} {noun}{lasting}."


def _value(content: Record, section: str, key: str) -> Any:
    """Returns a key of a file that may be old or damaged; None if it is missing."""
    values = content.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _describe_change(lines: list[Record], name: str, label: str) -> str:
    """Says what the metric was at first and at last, with 95% errors where they are known."""
    errors = _values(lines, f"{name}_stderr")
    values = _values(lines, name)
    texts = []
    for step in (min(values), max(values)):
        error = f" ± {CONFIDENCE * errors[step]:.2g}" if errors.get(step) else ""
        place = "before training" if step == 0 else f"at step {step:,}"
        texts.append(f"{values[step]:.3g}{error} {place}")
    if len(values) == 1:
        return f"The {label} was {texts[0]}."
    return f"The {label} went from {texts[0]} to {texts[1]}."
