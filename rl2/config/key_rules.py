"""The checks of single keys, as the schema declares them: choices, ranges, keys without effect.

Every check returns all problems that it finds, so that the user sees them at once.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl2.algorithms.find import CHOICES, ESTIMATOR_CHOICES, Choices
from rl2.config.conditions import corrects_mismatch
from rl2.config.engines import choose_engine
from rl2.config.key import Key, schema_keys
from rl2.config.presets import explain_algorithm
from rl2.config.problem import Problem, wrong_value
from rl2.config.schema import FOLLOWED_KEYS
from rl2.config.values import get_value
from rl2.model.adapter_folder import read_adapter_config

# The best rate of adapters is about ten times that of all weights: "LoRA without regret" (Schulman
# 2025), and docs/proofs.md.
LORA_LR_FACTOR = 10
Checked = tuple[list[Problem], list[Problem]]  # problems, warnings


def check_choices(config: Any) -> list[Problem]:
    """The keys whose value is none of their choices, or names no function."""
    problems: list[Problem] = []
    for name, key in schema_keys(type(config)).items():
        value = get_value(config, name)
        if key.functions:
            problems += function_problems(name, value, CHOICES[name])
        elif key.choices:
            words = value if isinstance(value, list) else [value]
            if any(isinstance(word, str) and word not in key.choices for word in words):
                problems.append(wrong_value(name, value, f"choose {describe_choices(key)}"))
    return problems


def describe_choices(key: Key) -> str:
    """The choices of a key in words. A key that has choices may also be a switch or a number."""
    *others, last = key.choices
    if bool in key.types:
        others = ["true", "false", *others]
    if int in key.types or float in key.types:
        others.append("a number")
    return f"{', '.join(others)} or {last}"


def function_problems(name: str, value: str, functions: Choices[Any]) -> Iterator[Problem]:
    """What is wrong with the function that a key names; for a published algorithm, its keys."""
    algorithm = explain_algorithm(value)
    hint = f"{algorithm}; or " if algorithm else ""
    for problem in functions.problems(value):
        yield wrong_value(name, value, hint + problem)


def check_keys(config: Any, set_keys: set[str]) -> Checked:
    """Values outside their range, unusual ones, and keys that the user set without an effect."""
    problems: list[Problem] = []
    warnings: list[Problem] = []
    defaults = type(config)()
    for name, key in schema_keys(type(config)).items():
        value, default = get_value(config, name), get_value(defaults, name)
        if key.is_section or isinstance(value, str) or value in (None, default):
            continue
        for bound in broken_bounds(key, value):
            reason = f"it must {bound}; {_show_default(key, default)}"
            problems.append(wrong_value(name, value, reason))
        effect = key.unusual.explain(value) if key.unusual is not None else ""
        if effect:
            warnings.append(Problem(name, value, f"{name}={value} {effect}"))
    for name in sorted(non_default_keys(config, set_keys)):
        reason, is_harmless = find_unused(config, name)
        if reason:
            value = get_value(config, name)
            problem = Problem(name, value, f"{name}={value} has no effect {reason}")
            (warnings if is_harmless else problems).append(problem)
    return problems, warnings


def broken_bounds(key: Key, value: Any) -> Iterator[str]:
    """The bounds of the key's range that the value breaks, in words that follow "it must".

    In a list or a map every item has to be within them. A word that a number may be has no bounds.
    """
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from broken_bounds(key, item)
    elif isinstance(value, str):
        if not value:
            yield "have no empty text"
    elif value is not None:  # an engine's argument may be null
        yield from key.range.broken_bounds(value)


def _show_default(key: Key, default: Any) -> str:
    """The default, explained where it is outside the range (-1 = all)."""
    if default is None:
        return "by default it is not set"
    is_special = any(broken_bounds(key, default))
    return f"the default is {default}" + (f" ({key.help})" if is_special else "")


def follow_keys(config: DictConfig, set_keys: set[str]) -> None:
    """Gives each key of FOLLOWED_KEYS that is not set, or null, the value of the key it follows.

    A key that is set to that value counts as not set. adv.norm_var follows the estimator,
    actor.correction the engine, and lora_rank the adapters that are trained further. With adapters
    the default of lr is higher.
    """
    root: Any = OmegaConf.get_type(config)
    known = schema_keys(root)
    for name, followed in FOLLOWED_KEYS.items():
        if name in known and followed in known:
            value = OmegaConf.select(config, followed)
            if name not in set_keys or OmegaConf.select(config, name) in (None, value):
                OmegaConf.update(config, name, value)
                set_keys.discard(name)
    for name in ("actor", "critic"):
        if f"{name}.adapter" in known:
            follow_adapter(config[name], f"{name}.lora_rank" in set_keys)
            if config[name].lora_rank and f"{name}.lr" not in set_keys:
                config[name].lr = round(LORA_LR_FACTOR * config[name].lr, 12)
    if "adv.norm_var" in known and config.adv.norm_var is None:
        # Every common PPO whitens the advantages of GAE; with groups it is a choice (GRPO or not).
        if "norm_var" in ESTIMATOR_CHOICES.settings_of(config.adv.estimator):
            config.adv.norm_var = config.adv.estimator == "gae"
    if "actor.correction" in known and config.actor.correction is None:
        config.actor.correction = default_correction(config)


def follow_adapter(worker: Any, is_rank_set: bool) -> None:
    """Gives a worker's section the rank of its adapters. What is wrong with them is told later."""
    if worker.adapter and not is_rank_set:
        with suppress(ValueError):
            worker.lora_rank = read_adapter_config(worker.adapter)["r"]


def default_correction(config: Any) -> str:
    """actor.correction where it is not set: it is on where the engine's probabilities differ.

    SGLang and vLLM have kernels of their own. A mask of whole sequences, as in TRL, leaves the
    gradient of the others unbiased. Partial rollouts continue under newer weights, where the
    product over a long answer is far from 1; it would mask just the answers that they are for, so
    each token is weighted instead. The embedded engine runs the trainer's own model.
    """
    if config.trainer.rollouts_from or corrects_mismatch(config.actor.loss):
        return "none"
    if config.rollout.partial:
        return "token_tis"
    return "none" if choose_engine(config.rollout.engine)[0] == "local" else "sequence_mask"


def without_repeats(problems: list[Problem]) -> list[Problem]:
    """Drops the problem of a key that has its wrong value from the key that it follows."""
    causes = [(problem.key, problem.value) for problem in problems]
    kept = []
    for problem in problems:
        if (FOLLOWED_KEYS.get(problem.key), problem.value) not in causes:
            kept.append(problem)
    return kept


def non_default_keys(config: Any, set_keys: set[str]) -> set[str]:
    """The keys that the user set to another value than they have without being set.

    Such a value has no effect to lose, and a whole config.yaml can be read back.
    """
    defaults = type(config)()
    known = schema_keys(type(config))  # without the arguments of the engine
    return set_keys - {n for n in known if get_value(config, n) == get_value(defaults, n)}


def find_unused(config: Any, name: str) -> tuple[str, bool]:
    """(why a key has no effect, or "" if it has one; whether the user may leave it so).

    A key has none if its section has none. An argument of the engine is in no schema.
    """
    path = name.rpartition(".")[0]
    reason, is_harmless = find_unused(config, path) if path else ("", False)
    key = schema_keys(type(config)).get(name)
    if reason or key is None:
        return reason, is_harmless
    section = get_value(config, path)
    condition = key.only_if
    if condition and not condition.holds(config, section):
        reason = condition.reason.format(config=config, section=section, path=path)
        return reason, condition.is_harmless
    return explain_setting(config, name, key) if key.setting_of else "", False


def explain_setting(config: Any, name: str, key: Key) -> str:
    """Why a setting of a function has no effect, or ""."""
    path, _, setting = name.rpartition(".")
    function_key = f"{path}.{key.setting_of}"
    function = get_value(config, function_key)
    functions = CHOICES[function_key]
    settings = functions.settings_of(function)
    if setting in settings:
        return ""
    if key.default_of in settings and get_value(config, f"{path}.{key.default_of}") is None:
        return ""
    used = f"which uses {', '.join(settings) or 'no setting'}"
    users = [
        other for other, declared in functions.built_in.items() if setting in declared.settings
    ]
    return f"with {function_key}={function}, {used}; {setting} is used by {', '.join(users)}"
