"""Rows and environment, read before a model is loaded: all their problems come at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl2.config.schema import DataConfig, DPOConfig, PPOConfig, RMConfig, SFTConfig
from rl2.data.chat import ChatTemplate
from rl2.data.examples import Examples, RowKind
from rl2.data.formats import ReadRow, read_pair_row, read_ppo_row, read_sft_row
from rl2.data.rows import Rows, load_rows
from rl2.env.call import Env
from rl2.env.load import load_env, preflight
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

    rows: dict[str, Rows] = field(default_factory=dict)  # by data.path and data.test_path
    env: Env | None = None
    problems: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_ppo_inputs(config: PPOConfig) -> tuple[Rows, Rows | None, Env]:
    """(rows, test rows, environment) of a PPO run. ValueError lists all problems.

    The first process prints the warnings.
    """
    inputs = Inputs()
    _read_rows(inputs, config, read_ppo_row)
    _read_env(inputs, config)
    if inputs.problems:
        raise ValueError("\n".join(inputs.problems.values()))
    if is_first_rank():
        for warning in inputs.warnings:
            print(f"warning: {warning}", flush=True)
    assert inputs.env is not None
    return inputs.rows["data.path"], inputs.rows.get("data.test_path"), inputs.env


def read_examples(config: Any, kind: RowKind, template: ChatTemplate) -> dict[str, Examples]:
    """The examples, by data.path and data.test_path. ValueError lists the problems of both.

    Only training rows are shuffled.
    """
    inputs = Inputs()
    _read_rows(inputs, config, kind.read)
    data = config.data
    examples: dict[str, Examples] = {}
    for key, rows in inputs.rows.items():
        try:
            examples[key] = Examples(
                rows,
                template,
                kind,
                max_length=data.max_length,
                shuffle=data.shuffle and key == "data.path",
                seed=data.seed,
                batch_size=data.batch_size,
            )
        except ValueError as error:
            inputs.problems[key] = str(error)
    if inputs.problems:
        raise ValueError("\n".join(inputs.problems.values()))
    return examples


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
    for key, path, split in (
        ("data.path", data.path, "train"),
        ("data.test_path", data.test_path, "test"),
    ):
        if not path or (limit and not Path(path).expanduser().exists()):
            continue
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
