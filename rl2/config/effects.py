"""Keys whose effect depends on more than another key: why they have none, or "".

The user believes that such a key does something to the algorithm, so it is refused. Keys that
need another one say so in the schema.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from rl2.config.conditions import (
    clips_to_sampler,
    compares_pairs,
    estimator_needs,
    has_section,
    needs_critic,
    needs_reference,
)


def of_critic(config: Any) -> str:
    if not has_section(config, "adv") or needs_critic(config.adv.estimator):
        return ""  # of a reward model it is the model
    return (
        f"with adv.estimator={config.adv.estimator}, which needs no critic: set adv.estimator=gae"
    )


def of_weights(config: Any) -> str:
    is_mixed = isinstance(config.data.path, dict)
    return "" if is_mixed else "with one source of rows: name several with data.path.NAME=PATH"


def of_curriculum(config: Any) -> str:
    return "" if config.trainer.n_epochs > 1 else "with trainer.n_epochs=1"


def of_correction_cap(config: Any) -> str:
    return "with actor.correction=none" if config.actor.correction == "none" else ""


def of_skip_threshold(config: Any) -> str:
    if clips_to_sampler(config) or config.actor.updates_per_step > 1:
        return ""
    return (
        "with one optimizer step per rollout, where the ratio is 1: raise "
        "actor.update_per_rollout or actor.epochs_per_rollout"
    )


def of_teacher_coef(config: Any) -> str:
    estimator = config.adv.estimator
    if "teacher_logps" not in estimator_needs(estimator):
        return ""
    return f"with adv.estimator={estimator}, where it is the whole advantage"


def of_reference(config: Any) -> str:
    return "" if needs_reference(config) else "with kl.coef=0"


def of_pairs(config: Any) -> str:
    one_by_one = f"with dpo.loss={config.dpo.loss}, which takes replies one by one"
    return "" if compares_pairs(config) else one_by_one


def of_new_adapters(config: Any, worker: str) -> str:
    has_earlier_ones = getattr(config, worker).adapter
    return f"with {worker}.adapter, whose own value counts" if has_earlier_ones else ""


EFFECTS: dict[str, Callable[[Any], str]] = {
    "critic": of_critic,
    "data.weights": of_weights,
    "data.curriculum": of_curriculum,
    "actor.correction_cap": of_correction_cap,
    "actor.skip_threshold": of_skip_threshold,
    "teacher.coef": of_teacher_coef,
    "kl.update_freq": of_reference,
    "dpo.sft_coef": of_pairs,
}
for worker in ("actor", "critic"):
    for name in ("lora_alpha", "lora_targets"):
        EFFECTS[f"{worker}.{name}"] = partial(of_new_adapters, worker=worker)
