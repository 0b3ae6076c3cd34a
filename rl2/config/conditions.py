"""When a key of the config has an effect.

A condition reads a config, whose sections say which trainer it is: `rollout` is PPO's, `dpo` and
`rm` are those of DPO and of reward models. The schema names the conditions beside its keys.
"""

from collections.abc import Mapping
from typing import Any

import torch

from rl2.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl2.config.by_name import Function, argument_names, find_function
from rl2.config.key import Condition
from rl2.engine.select import choose_engine


def function_settings(name: str, table: Mapping[str, Function], key: str) -> tuple[str, ...]:
    """The parameter names of the function that `key` names; () if there is no such function.

    A wrong name is reported once, by the check of choices.
    """
    try:
        return argument_names(find_function(name, table, key))
    except ValueError:
        return ()


def estimator_inputs(estimator: str) -> tuple[str, ...]:
    """What the advantage estimator asks for: columns of the batch and settings."""
    return function_settings(estimator, ADVANTAGE_ESTIMATORS, "adv.estimator")


def needs_critic(estimator: str) -> bool:
    """Whether the advantage estimator asks for the values that a critic gives."""
    return "values" in estimator_inputs(estimator)


def has_section(config: Any, *names: str) -> bool:
    """Whether the config has one of these sections."""
    return any(hasattr(config, name) for name in names)


def has_new_adapters(config: Any) -> bool:
    """Whether a worker trains adapters, whose weights are random at first."""
    return any(getattr(section, "lora_rank", 0) for section in vars(config).values())


WITH_TEST_DATA = Condition(
    lambda config, section: config.data.has_test_rows,
    "without data.test_path or data.test_ratio",
    is_harmless=True,
)
WITH_TRAINING_ROWS = Condition(
    lambda config, section: not config.trainer.eval_only or config.data.test_ratio,
    "with trainer.eval_only=true",
    is_harmless=True,
)
WITH_CRITIC = Condition(
    lambda config, section: needs_critic(config.adv.estimator),
    "with adv.estimator={config.adv.estimator}, which needs no critic: set adv.estimator=gae",
)
WITH_SGLANG = Condition(
    lambda config, section: choose_engine(section.engine)[0] == "sglang",
    "with rollout.engine={section.engine}, which is the local engine here",
    is_harmless=True,
)
WITH_GPU = Condition(
    lambda config, section: torch.cuda.is_available(), "without a GPU", is_harmless=True
)
WITH_FILTER = Condition(lambda config, section: section.filter, "without rollout.filter")
WITH_LORA = Condition(lambda config, section: section.lora_rank, "with {path}.lora_rank=0")
WITH_SAMPLING = Condition(
    lambda config, section: has_section(config, "rollout"),
    "where nothing is sampled",
    is_harmless=True,
)
WITH_RANDOMNESS = Condition(
    lambda config, section: has_section(config, "rollout") or has_new_adapters(config),
    "where nothing is sampled and lora_rank=0",
    is_harmless=True,
)
WITH_INFERENCE = Condition(  # DPO infers with its reference, PPO before its updates
    lambda config, section: has_section(config, "rollout", "dpo") or config.data.has_test_rows,
    "without data.test_path or data.test_ratio",
    is_harmless=True,
)
WITH_GROUPS = Condition(
    lambda config, section: has_section(config, "rollout", "dpo", "rm"),
    "in SFT, where no rows share a prompt",
    is_harmless=True,
)
WITH_LOGITS = Condition(
    lambda config, section: section is not getattr(config, "critic", None),
    "in a critic or reward model, whose values are always float32",
    is_harmless=True,
)
