"""What a report says first: a run in a few sentences, and the metrics that show its result."""

import math
import re
from typing import Any

from rl2.config.presets import load_presets, preset_of
from rl2.report.saved import Record
from rl2.run.success import REWARD, saved_score, training_metric

TRAINERS = {  # by the class of the config
    "PPOConfig": "with reinforcement learning",
    "SFTConfig": "with SFT",
    "DPOConfig": "with DPO",
    "RMConfig": "as a reward model",
}
# The first one that a run has is what its training is about.
TRAINED = {
    "reward/mean": "mean reward in training",
    "actor/loss": "training loss",
    "critic/loss": "training loss",
}
HELD_OUT = {  # patterns of metrics after test/ or test/NAME/
    r"reward/mean": "mean reward",
    r"avg@\d+": "share of right answers",
    r"loss": "loss",
    r"accuracy": "accuracy",
}
MAX_HEADLINES = 6  # with more test sets, the others are among the curves
CONFIDENCE = 1.96  # standard errors: 95%


def summarize(lines: list[Record], config: Any, record: Any) -> Record:
    """Returns the summary of a run: sentences, and the metrics that a report shows large.

    `lines` are those of metrics.jsonl in the order of their steps. `config` and `record` are the
    contents of config.yaml and run.json; None if they cannot be read.
    """
    config, record = config or {}, record or {}
    trained = [line for line in lines if line["step"] > 0]
    score = saved_score(config)
    labels_in_training = TRAINED
    if score is not None:
        labels_in_training = {training_metric(score): f"mean {score} in training"} | TRAINED
    trained_metrics = [name for name in labels_in_training if any(_values(trained, name))][:1]
    held_out = _find_held_out(lines, score)
    found = {name: labels_in_training[name] for name in trained_metrics} | held_out
    labels = dict(list(found.items())[:MAX_HEADLINES])
    sentences = [_describe_training(lines, config, record)]
    sentences += [_describe_change(lines, name, label) for name, label in labels.items()]
    best = record.get("best")
    if best:
        sentences.append(
            f"The best {best['metric']} was {best['value']:.3g}, at step {best['step']:,}; "
            "best_model/ has its model."
        )
    if lines and not held_out:
        sentences.append("No held-out rows were evaluated.")
    elif len(found) > len(labels):
        sentences.append("Results of more test sets are among the curves.")
    return {"sentences": sentences, "headlines": labels}


def _values(lines: list[Record], name: str) -> list[tuple[int, float]]:
    """Returns (step, value) of the lines that have the metric."""
    pairs = [(line["step"], line.get(name)) for line in lines]
    return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]


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
            values = [value for _, value in _values(lines, name)] if match else []
            # No answer is ever right where rewards do not say what is right.
            is_told = any(values) if "avg@" in name and score is None else values
            if match and is_told:
                found[name] = f"held-out {label} of {match[1]}" if match[1] else f"held-out {label}"
    return found


def _describe_training(lines: list[Record], config: Record, record: Record) -> str:
    """Says which model was trained, how, for how many steps and how long."""
    model = _model_of(config)
    num_done = max((line["step"] for line in lines), default=0)
    start = (record.get("starts") or [{}])[-1]
    seconds = sum(value for _, value in _values(lines, "time/step"))
    lasting = f" in {describe_seconds(seconds)}" if seconds else ""
    if num_done == 0:
        if (config.get("trainer") or {}).get("eval_only") and lines:
            return f"{model} was evaluated{lasting}, without training."
        return f"{model}: no step of training is finished yet."
    trainer = (record.get("identity") or {}).get("trainer", "")
    how = f" {TRAINERS[trainer]}" if trainer in TRAINERS else ""
    if trainer == "PPOConfig":
        how = _describe_algorithm(config) or how
    num_steps = start.get("num_steps") or num_done
    steps = f"{num_done:,} of {num_steps:,}" if num_done < num_steps else f"{num_done:,}"
    noun = "step" if steps == "1" else "steps"
    return f"{model} was trained{how} for {steps} {noun}{lasting}."


def _describe_algorithm(config: Record) -> str:
    """Such as " with GRPO (algo=grpo)", or the estimator and the loss that no preset has."""
    if name := preset_of(config):
        return f" with {load_presets()[name].title} (algo={name})"
    named = (("adv", "estimator"), ("actor", "loss"))
    values = [(f"{name}.{key}", (config.get(name) or {}).get(key)) for name, key in named]
    keys = ", ".join(f"{key}={value}" for key, value in values if value)
    return f" with reinforcement learning ({keys})" if keys else ""


def _model_of(config: Record) -> str:
    sections = [config.get(name) or {} for name in ("actor", "critic")]
    names = [section.get("model_name") for section in sections]
    return next((str(name) for name in names if name), "A model")


def describe_seconds(seconds: float) -> str:
    """Such as "48 s", "7 min 18 s", "3 h 12 min" and "2 d 5 h"."""
    if seconds < 59.5:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def _describe_change(lines: list[Record], name: str, label: str) -> str:
    """Says what the metric was at first and at last, with 95% errors where they are known."""
    errors = dict(_values(lines, f"{name}_stderr"))
    values = _values(lines, name)
    texts = []
    for step, value in (values[0], values[-1]):
        error = f" ± {CONFIDENCE * errors[step]:.2g}" if errors.get(step) else ""
        place = "before training" if step == 0 else f"at step {step:,}"
        texts.append(f"{value:.3g}{error} {place}")
    if len(values) == 1:
        return f"The {label} was {texts[0]}."
    return f"The {label} went from {texts[0]} to {texts[1]}."
