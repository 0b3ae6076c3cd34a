"""The checks of a config before a model is loaded.

key_rules.py has the checks of single keys, model_rules.py those of a model, play_rules.py those of
environments, ppo_rules.py those of PPO alone. A check yields all problems that it finds, so that
the user sees them at once.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl2.config.conditions import (
    loads_teacher,
    needs_critic,
    needs_reference_point,
)
from rl2.config.engines import is_installed
from rl2.config.key_rules import check_choices, check_keys, without_repeats
from rl2.config.model_rules import check_model, find_base_warnings
from rl2.config.ppo_rules import check_ppo, find_ppo_warnings
from rl2.config.problem import Problem, wrong_value
from rl2.config.schema import (
    DataConfig,
    DPOConfig,
    ModelConfig,
    PPOConfig,
    WorkerConfig,
    worker_names,
)

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


def validate(config: Any, set_keys: set[str]) -> tuple[list[Problem], list[Problem]]:
    """(problems, warnings) of a config whose keys and types are right.

    `set_keys` are the keys that the user set.
    """
    problems = check_choices(config)
    if problems:  # which may be why other keys seem to have no effect
        set_keys = set()
    warnings: list[Problem] = []
    problems += check_keys(config, set_keys)
    problems += check_data(config.data)
    problems += check_experiment_name(config.trainer.experiment_name)
    problems += check_resume(config.trainer.resume)
    problems += check_best(config)
    problems += check_loggers(config.trainer.loggers)
    if isinstance(config, DPOConfig):
        problems += check_dpo(config)
    if config.trainer.test_freq and not config.data.has_test_rows:
        reason = "there are no test rows: set data.test_path or data.test_ratio"
        warnings.append(wrong_value("trainer.test_freq", config.trainer.test_freq, reason))
    for name, model in loaded_models(config).items():
        problems += check_model(config, name, model)
        if isinstance(model, WorkerConfig):
            warnings += find_base_warnings(config, name, model)
    if isinstance(config, PPOConfig):
        problems += check_ppo(config)
        warnings += find_ppo_warnings(config, set_keys)
    return without_repeats(config, problems), warnings


def loaded_models(config: Any) -> dict[str, ModelConfig]:
    """The sections of the models that the run loads, by name."""
    models: dict[str, ModelConfig] = {name: getattr(config, name) for name in worker_names(config)}
    if isinstance(config, PPOConfig):
        if not needs_critic(config.adv.estimator):
            del models["critic"]
        if loads_teacher(config):
            models["teacher"] = config.teacher
    return models


def check_data(data: DataConfig) -> Iterator[Problem]:
    """Whether the rows and the chat template exist."""
    for key, path in {**data.train_paths, **data.test_paths}.items():
        yield from check_rows(key, path)
    yield from check_sources(data)
    if data.test_ratio and data.test_path:
        reason = "data.test_path has the test rows already; leave one of the two out"
        yield wrong_value("data.test_ratio", data.test_ratio, reason)
    template = data.chat_template
    if template not in (None, "plain") and not Path(template).expanduser().is_file():
        reason = "choose plain or the path of a Jinja file"
        if "/" in template or template.endswith((".jinja", ".j2", ".txt")):
            reason = "no such file"
        yield wrong_value("data.chat_template", template, reason)
    prompt = data.system_prompt_file
    if prompt is not None and not prompt.is_file():
        yield wrong_value("data.system_prompt", prompt, "no such file")


def check_sources(data: DataConfig) -> Iterator[Problem]:
    """Whether there is a source, and whether weights are of all sources."""
    if not isinstance(data.path, dict):
        return
    if not data.path:
        yield wrong_value("data.path", data.path, "it names no source; write data.path.NAME=PATH")
    for name, weight in data.weights.items():
        if name not in data.path:
            reason = f"data.path has no source of this name; it has {', '.join(data.path)}"
            yield wrong_value(f"data.weights.{name}", weight, reason)
    lacking = [name for name in data.path if name not in data.weights]
    if data.weights and lacking:
        # A weight is a share among weights: what the number of rows would be there is not clear.
        reason = f"give a weight to each source, also to {', '.join(lacking)}, or to none"
        yield wrong_value("data.weights", data.weights, reason)


def check_rows(key: str, path: Any) -> Iterator[Problem]:
    """Whether the rows exist, unless they are a dataset of the hub or the path is missing."""
    if not isinstance(path, str):
        reason = "expected a path, of several files the folder that they are in"
        if key in ("data.path", "data.test_path"):
            reason += f", or {key}.NAME=PATH for each of several sets"
        yield wrong_value(key, path, reason)
        return
    is_local = path.endswith(DATA_SUFFIXES) or path.startswith(("/", ".", "~"))
    if is_local and not Path(path).expanduser().exists():
        hint = "; give the folder, since * is not expanded" if "*" in path else ""
        yield wrong_value(key, path, f"no such file or folder{hint}")


def check_dpo(config: DPOConfig) -> Iterator[Problem]:
    """Whether a step has the two rows whose prompts and replies are exchanged for KTO's KL."""
    if config.data.batch_size == 1 and needs_reference_point(config.dpo.loss):
        reason = (
            f"dpo.loss={config.dpo.loss} estimates a KL from prompts with replies to other prompts "
            "of the step: take 2 rows or more"
        )
        yield wrong_value("data.batch_size", 1, reason)


def check_experiment_name(name: str) -> Iterator[Problem]:
    """Whether the name stays a folder below runs/, where the run writes by default."""
    if ".." in Path(name).parts:
        reason = "it is a folder below runs/; choose a name such as first"
        yield wrong_value("trainer.experiment_name", name, reason)


def check_resume(resume: str) -> Iterator[Problem]:
    """Whether the folder to resume from exists."""
    folder = Path(resume.removeprefix("force:"))
    if resume not in ("auto", "off", "force") and not folder.is_dir():
        yield wrong_value("trainer.resume", resume, explain_resume(folder))


def explain_resume(folder: Path) -> str:
    """Why there is no checkpoint in the folder, which does not exist, and what there is."""
    if len(folder.parts) == 1:
        return "choose auto, off, force or the folder of a checkpoint"
    steps = sorted(path.name for path in folder.parent.glob("step_*") if path.is_dir())
    there_are = f"; {folder.parent} has {', '.join(steps)}" if steps else ""
    return f"no such folder{there_are}"


def check_best(config: Any) -> Iterator[Problem]:
    """Whether there are evaluations to choose the best one from, and whether one is named."""
    trainer = config.trainer
    if trainer.patience is not None and trainer.save_best is None:
        message = (
            f"trainer.patience={trainer.patience} needs trainer.save_best, the score that it "
            "watches, e.g. trainer.save_best=auto"
        )
        yield Problem("trainer.patience", trainer.patience, message)
    if trainer.save_best is None:
        return
    key = f"trainer.save_best={trainer.save_best}"
    message = ""
    if trainer.eval_only or getattr(trainer, "rollouts_from", None):
        other = "eval_only" if trainer.eval_only else "rollouts_from"
        message = f"{key} has no effect with trainer.{other}: leave one of them out"
    elif not config.data.has_test_rows:
        message = f"{key} needs test rows: set data.test_path or data.test_ratio"
    elif trainer.test_freq is None:
        message = (
            f"{key} needs trainer.test_freq, the steps between evaluations: without it only the "
            "last step is evaluated"
        )
    elif trainer.save_best.lower() in ("true", "yes", "on", "1"):
        message = f"{key} names no metric: auto keeps the best by the reward, or by the loss"
    if message:
        yield Problem("trainer.save_best", trainer.save_best, message)


def check_loggers(names: list[str]) -> Iterator[Problem]:
    """Whether the packages of services are installed. A run says for itself that it lacks wandb."""
    for name in ("tensorboard", "trackio"):
        if name in names and not is_installed(name):
            reason = f"{name} is not installed; pip install {name}"
            yield wrong_value("trainer.loggers", names, reason)
