"""Rows and environment, read before a model is loaded: all their problems come at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl2.config.conditions import is_evaluation
from rl2.config.schema import (
    DataConfig,
    DPOConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    worker_names,
)
from rl2.data.chat import ChatTemplate
from rl2.data.examples import PROMPT_ROWS, Examples, RowKind
from rl2.data.formats import ReadRow, read_pair_row, read_ppo_row, read_sft_row
from rl2.data.rows import Rows, load_rows
from rl2.env.call import Env
from rl2.env.load import load_env, preflight
from rl2.model.folder import check_length
from rl2.parallel.mesh import is_first_rank

TRIAL_ROWS = 1000  # rows that are read to show problems of the data beside those of the config
READERS: dict[type, Callable[[dict], ReadRow]] = {
    PPOConfig: read_ppo_row,
    SFTConfig: read_sft_row,
    DPOConfig: read_pair_row,
    RMConfig: read_pair_row,
}


@dataclass
class Inputs:
    """What was read. `problems` has a message for each key whose value cannot be used."""

    rows: dict[str, Rows] = field(default_factory=dict)  # by data.path and the keys of test sets
    env: Env | None = None
    problems: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def check(self) -> None:
        """ValueError with all problems."""
        if self.problems:
            raise ValueError("\n".join(self.problems.values()))


def read_ppo_inputs(config: PPOConfig) -> tuple[dict[str, Rows], Env]:
    """(rows by key, environment) of a PPO run. ValueError lists all problems.

    The first process prints the warnings.
    """
    inputs = Inputs()
    _read_rows(inputs, config, read_ppo_row)
    _read_env(inputs, config)
    inputs.check()
    print_once([f"warning: {warning}" for warning in inputs.warnings])
    assert inputs.env is not None
    return inputs.rows, inputs.env


def make_prompts(
    config: PPOConfig, rows: dict[str, Rows], template: ChatTemplate
) -> tuple[Examples | None, dict[str, Examples]]:
    """(the prompts to train on, None in an evaluation; those of each test set by its name).

    ValueError lists all problems, or says that a trajectory may get too long for the model.
    """
    make = partial(Examples, kind=PROMPT_ROWS, batch_size=config.data.prompts_per_rollout)
    train, tests = _make_items(Inputs(rows), config.data, template, make)
    if config.trainer.eval_only:
        train = None
    elif train is not None:
        _check_trajectory_length(config, "train", train)
    for prompts in tests.values():
        _check_trajectory_length(config, "test", prompts)
    return train, tests


def _check_trajectory_length(config: PPOConfig, split: str, prompts: Examples) -> None:
    """ValueError if the longest trajectory of the split has more positions than the model."""
    max_turns = config.rollout.max_turns
    answer = getattr(config.rollout, f"{split}_sampling_params").max_new_tokens
    check_length(
        "actor.model_name",
        config.actor.model_name,
        prompts.longest + max_turns * answer,
        f"a trajectory may get {prompts.longest} (the longest {split} prompt) + {max_turns} x "
        f"{answer} tokens: lower rollout.{split}_sampling_params.max_new_tokens, "
        "data.max_length or rollout.max_turns",
    )


def read_examples(
    config: Any, kind: RowKind, template: ChatTemplate
) -> tuple[Examples, dict[str, Examples]]:
    """(the examples to train on; those of each test set by its name).

    ValueError lists all problems, or says that a row has more positions than the model.
    """
    inputs = Inputs()
    _read_rows(inputs, config, kind.read)
    make = partial(Examples, kind=kind, batch_size=config.data.batch_size)
    train, tests = _make_items(inputs, config.data, template, make)
    assert train is not None
    [worker_name] = worker_names(config)
    longest = max(items.longest for items in (train, *tests.values()))
    check_length(
        f"{worker_name}.model_name",
        getattr(config, worker_name).model_name,
        longest,
        f"a row has {longest} tokens: lower data.max_length",
    )
    return train, tests


def _make_items(
    inputs: Inputs, data: DataConfig, template: ChatTemplate, make: Callable[..., Examples]
) -> tuple[Examples | None, dict[str, Examples]]:
    """Tokenises the rows, and splits test rows off. Only training rows are shuffled.

    The name of a test set is that of data.test_path.NAME, or "".
    """
    tests: dict[str, Examples] = {}
    for key, rows in inputs.rows.items():
        try:
            tests[key.removeprefix("data.test_path").removeprefix(".")] = make(
                rows,
                template,
                max_length=data.max_length,
                shuffle=data.shuffle and key == "data.path",
                seed=data.seed,
            )
        except ValueError as error:
            inputs.problems[key] = str(error)
    inputs.check()
    train = tests.pop("data.path", None)
    if train is not None and data.test_ratio:
        tests[""] = train.split_off(data.test_ratio)
    for items in tests.values():
        items.kept = items.kept[: data.test_limit]
        print_once(items.describe_dropped("test "))
    if train is not None:
        print_once(train.describe_dropped("training "))
    return train, tests


def print_once(sentences: list[str]) -> None:
    """The first process prints the sentences, one a line."""
    for sentence in sentences if is_first_rank() else []:
        print(sentence, flush=True)


def find_input_problems(config: Any) -> dict[str, str]:
    """Key -> problem, of the data and the environment of a config that has other problems.

    Only the first rows of files that are here are read.
    """
    inputs = Inputs()
    read = next(READERS[kind] for kind in type(config).__mro__ if kind in READERS)
    _read_rows(inputs, config, read, TRIAL_ROWS)
    if isinstance(config, PPOConfig) and config.rollout.env_path:
        _read_env(inputs, config)
    return inputs.problems


def make_chat_template(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, day: str
) -> ChatTemplate:
    """The chat template of a run that first started on `day`, YYYY-MM-DD. ValueError in words."""
    return ChatTemplate(
        tokenizer,
        data.chat_template,
        data.chat_template_kwargs,
        data.system_prompt,
        date.fromisoformat(day),
    )


def _read_rows(
    inputs: Inputs, config: Any, read: Callable[[dict], ReadRow], limit: int | None = None
) -> None:
    """Reads the rows. With a limit it leaves out what is not on this machine."""
    data = config.data
    paths = {"data.path": data.path, **data.test_paths}
    if is_evaluation(config) and not data.test_ratio:
        del paths["data.path"]
    for key, path in paths.items():
        if not path or (limit and not Path(path).expanduser().exists()):
            continue
        split = "train" if key == "data.path" else "test"
        try:
            inputs.rows[key] = load_rows(path, split, read, data.columns, limit)
        except ValueError as error:
            inputs.problems[key] = str(error)


def _read_env(inputs: Inputs, config: PPOConfig) -> None:
    """Loads the environment, and tries it on the rows."""
    rollout = config.rollout
    try:
        inputs.env = load_env(
            rollout.env_path,
            rollout.env_timeout,
            rollout.env_concurrency,
            rollout.env_isolation,
        )
        inputs.warnings = preflight(inputs.env, inputs.rows, rollout.max_turns)
    except ValueError as error:
        inputs.problems["rollout.env_path"] = str(error)
