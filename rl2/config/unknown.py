"""What an unknown key may mean: near names, and those of other trainers of language models."""

import difflib

from rl2.config.key import Key, schema_keys
from rl2.config.presets import KEY, has_presets
from rl2.config.schema import TRAINER_CONFIGS
from rl2.config.values import declared_key, show_value

MICRO_BATCH = ("actor.max_length_per_device", "critic.max_length_per_device", "data.batch_size")
NEW_TOKENS = ("rollout.train_sampling_params.max_new_tokens",)
# Usual names of other trainers whose keys here have no near name -> these keys, in any trainer.
# docs/coming_from.md has more.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "algorithm": (KEY,),
    "batch_size": ("data.prompts_per_rollout", "data.batch_size"),
    "beta": ("kl.coef", "dpo.beta"),
    "clip_ratio": ("actor.clip",),
    "epsilon": ("actor.clip",),
    "eval_steps": ("trainer.test_freq",),
    "gradient_accumulation_steps": ("actor.update_per_rollout", "data.batch_size"),
    "kl_coef": ("kl.coef",),
    "kl_loss_coef": ("kl.coef",),
    "learning_rate": ("actor.lr", "critic.lr"),
    "loss_agg_mode": ("actor.average",),
    "max_completion_length": NEW_TOKENS,
    "max_prompt_length": ("data.max_length",),
    "max_response_length": NEW_TOKENS,
    "model.path": ("actor.model_name", "critic.model_name"),
    "model_name_or_path": ("actor.model_name", "critic.model_name"),
    "n": ("data.responses_per_prompt",),
    "num_generations": ("data.responses_per_prompt",),
    "num_iterations": ("actor.epochs_per_rollout", "critic.epochs_per_rollout"),
    "num_train_epochs": ("trainer.n_epochs",),
    "output_dir": ("trainer.save_dir",),
    "per_device_train_batch_size": MICRO_BATCH,
    "ppo_epochs": ("actor.epochs_per_rollout", "critic.epochs_per_rollout"),
    "ppo_mini_batch_size": ("actor.update_per_rollout", "critic.update_per_rollout"),
    "reward_funcs": ("rollout.env_path",),
    "run_name": ("trainer.experiment_name",),
    "save_steps": ("trainer.save_freq",),
    "train_batch_size": ("data.prompts_per_rollout", "data.batch_size"),
    "train_files": ("data.path",),
    "val_files": ("data.test_path",),
}


def explain_unknown(name: str, value: object, known: dict[str, Key]) -> str:
    """What to write instead of an unknown key."""
    keys = [other for other in known if not known[other].is_section]
    near = near_keys(name, keys + [KEY] if has_presets(known) else keys)
    declared = declared_key(name)
    last_part = declared.rpartition(".")[2]
    of_tests = f"rollout.test_sampling_params.{last_part}"
    if last_part.endswith("_penalty") and of_tests in known:
        return (
            f"unknown key {name}={show_value(value)}: training has no penalties, since the trained "
            f"policy would not be the one that sampled; for tests set {of_tests}"
        )
    others = [other for other, kind in TRAINER_CONFIGS.items() if declared in schema_keys(kind)]
    if others:  # it is no misspelled key, but may be in another section here
        near = [key for key in near if key.endswith(f".{last_part}")]
    text = f"did you mean {' or '.join(near)}?" if near else "--help all lists all"
    if others:
        text = f"it is a key of {', '.join(others)}; {text}"
    elif not near:
        text += ", docs/coming_from.md those of other trainers"
    return f"unknown key {name}={show_value(value)}: {text}"


def near_keys(key: str, keys: list[str]) -> list[str]:
    """Up to three keys that a misspelled one may mean.

    Those of another trainer's name, or that it begins, else near names, else names with a near last
    part.
    """
    key = key.lower()
    near = other_names(key, keys) or [name for name in keys if name.startswith(f"{key}_")]
    near = near or difflib.get_close_matches(key, keys, 3, 0.8)
    if not near:
        last_part = difflib.SequenceMatcher(b=key.rpartition(".")[2])
        for name in keys:
            last_part.set_seq1(name.rpartition(".")[2])
            if last_part.ratio() >= 0.7:
                near.append(name)
    return near[:3]


def other_names(key: str, keys: list[str]) -> list[str]:
    """The `keys` that a key of another trainer means: of the same section, if it has some."""
    parts = key.split(".")
    for start in range(len(parts)):
        meant = OTHER_NAMES.get(".".join(parts[start:]), ())
        near = [name for name in meant if name in keys]
        if near:
            return [name for name in near if name.split(".")[0] in parts[:start]] or near
    return []
