"""The rules of single keys, as the schema declares them: choices, ranges, keys without effect.

Every check returns all problems that it finds, so that the user sees them at once.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rl2.adapter_folder import read_adapter_config
from rl2.algorithms.find import CHOICES
from rl2.config.combinations import EXCLUDES, NEEDS
from rl2.config.conditions import corrects_mismatch
from rl2.config.engines import choose_engine
from rl2.config.key import Key, schema_keys
from rl2.config.presets import explain_algorithm
from rl2.config.problem import Problem, unfit_value, wrong_value
from rl2.config.schema import Config, PPOConfig, worker_names
from rl2.config.values import declared_key, get_value, show_value

# The best rate of adapters is about ten times that of all weights: "LoRA without regret" (Schulman
# 2025), and docs/proofs.md.
LORA_LR_FACTOR = 10


def check_choices(config: Config) -> list[Problem]:
    """The keys whose value is none of their choices, or names no function."""
    problems: list[Problem] = []
    for name, key in schema_keys(type(config)).items():
        value = get_value(config, name)
        if key.functions:
            try:
                CHOICES[name].check(value)
            except ValueError as error:
                algorithm = explain_algorithm(value)
                hint = f"{algorithm}; or " if algorithm else ""
                problems.append(wrong_value(name, value, f"{hint}{error}"))
        elif key.choices:
            words = value if isinstance(value, list) else [value]
            if any(isinstance(word, str) and word not in key.choices for word in words):
                choices = [*key.choices, "a number"] if float in key.types else key.choices
                problems.append(wrong_value(name, value, f"choose {', '.join(choices)}"))
    return problems


def check_keys(config: Config, set_keys: set[str]) -> list[Problem]:
    """Values outside their range, empty texts, and keys that the user set without an effect."""
    problems: list[Problem] = []
    for name, key in schema_keys(type(config)).items():
        value, default = get_value(config, name), default_value(config, name)
        if value == "" and name in set_keys:
            reason = "write a value, or leave the key out; is a shell variable unset?"
            problems.append(wrong_value(name, value, reason))
        if key.is_section or isinstance(value, str) or value in (None, default):
            continue
        for bound in broken_bounds(key, value):
            reason = f"it must {bound}; the default is {show_value(default)}"
            problems.append(wrong_value(name, value, reason))
    wrong = {problem.key for problem in problems}
    for name in sorted(non_default_keys(config, set_keys) - wrong):
        value = get_value(config, name)
        if reason := explain_unused(config, name):
            problems.append(unfit_value(name, value, f"has no effect {reason}"))
        for other in listed(EXCLUDES, name):
            if value and is_met(config, other):
                other = other.partition("=")[0]
                given = f"{other}={show_value(get_value(config, other))}"
                text = f"does not go with {given}: leave one out"
                problems.append(unfit_value(name, value, text))
    return problems


def default_value(config: Config, name: str) -> Any:
    """The value that a key of the config has if it is not set."""
    key = schema_keys(type(config))[name]
    return get_value(config, key.leader) if key.leader else key.default


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
        yield from key.broken_bounds(value)


def derive_keys(config: Config, set_keys: set[str]) -> None:
    """Sets what follows from other keys unless it is set itself.

    lora_rank is that of the adapters that are trained further, and lr is higher with adapters.
    adv.norm_var follows the estimator, and actor.correction the engine.
    """
    for name in worker_names(config):
        worker = getattr(config, name)
        if worker.adapter and f"{name}.lora_rank" not in set_keys:
            with suppress(ValueError):  # what is wrong with the adapters is told later
                worker.lora_rank = read_adapter_config(worker.adapter)["r"]
        if worker.lora_rank and f"{name}.lr" not in set_keys:
            worker.lr = round(LORA_LR_FACTOR * worker.lr, 12)
    if isinstance(config, PPOConfig):
        # Every common PPO whitens the advantages of GAE; with groups it is a choice (GRPO or not).
        is_read = "norm_var" in CHOICES["adv.estimator"].look_up(config.adv.estimator).settings
        if is_read and config.adv.norm_var is None:
            config.adv.norm_var = config.adv.estimator == "gae"
        if config.actor.correction is None:
            config.actor.correction = default_correction(config)


def default_correction(config: PPOConfig) -> str:
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


def without_repeats(config: Config, problems: list[Problem]) -> list[Problem]:
    """Drops the problem of a key that has its wrong value from the key that it follows."""
    causes = [(problem.key, problem.value) for problem in problems]
    known = schema_keys(type(config))
    leaders = {name: key.leader for name, key in known.items() if key.leader}
    return [p for p in problems if (leaders.get(p.key), p.value) not in causes]


def non_default_keys(config: Config, set_keys: set[str]) -> set[str]:
    """The keys that the user set to another value than they have without being set.

    Such a value has no effect to lose, and a whole config.yaml can be read back.
    """
    known = set(map(declared_key, set_keys)) & schema_keys(type(config)).keys()
    return {name for name in known if get_value(config, name) != default_value(config, name)}


def explain_unused(config: Config, name: str) -> str:
    """Why a key or a section has no effect; "" if it has one.

    A key has none if its section has none.
    """
    path = name.rpartition(".")[0]
    if reason := explain_unused(config, path) if path else "":
        return reason
    needed = listed(NEEDS, name)
    if needed and not any(is_met(config, need) for need in needed):
        return f"without {' or '.join(needed)}"
    return explain_setting(config, name)


def listed(table: dict[str, tuple[str, ...]], name: str) -> list[str]:
    """The names that NEEDS or EXCLUDES has for a key, in full."""
    section, _, last = name.rpartition(".")
    if section in ("actor", "critic") and last in table:
        return [f"{section}.{other}" for other in table[last]]
    return [*table.get(name, ())]


def is_met(config: Config, need: str) -> bool:
    """Whether KEY has a value that is neither off nor its default, or that of KEY=VALUE."""
    name, equals, wanted = need.partition("=")
    if name not in schema_keys(type(config)):  # of another trainer
        return False
    value = get_value(config, name)
    return value == wanted if equals else bool(value) and value != default_value(config, name)


def explain_setting(config: Config, name: str) -> str:
    """Why a key that is a setting of losses or estimators has no effect, or ""."""
    section, _, setting = name.rpartition(".")
    for key, functions in CHOICES.items():
        is_of_section = key.startswith(f"{section}.")
        if not is_of_section or not any(setting in kind.settings for kind in functions.kinds):
            continue
        used = functions.look_up(get_value(config, key)).settings
        is_default = (
            setting == "clip" and "clip_high" in used and not get_value(config, "actor.clip_high")
        )
        if setting not in used and not is_default:
            users = [
                user for user, other in functions.built_in.items() if setting in other.settings
            ]
            return (
                f"with {key}={get_value(config, key)}, which uses {', '.join(used) or 'no setting'}"
                f"; {setting} is used by {', '.join(users)}"
            )
    return ""
