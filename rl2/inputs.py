"""Rows and environment, read before a model is loaded: all their problems come at once."""

from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl2.config.schema import DataConfig, PPOConfig, SFTConfig, SFTDataConfig, worker_names
from rl2.data.chat import ChatTemplate
from rl2.data.examples import PAIR_ROWS, PROMPT_ROWS, SFT_ROWS, Examples, RowKind
from rl2.data.formats import NO_TEMPLATE
from rl2.data.rows import Rows, hash_data, load_rows
from rl2.env.call import Env
from rl2.env.load import load_env, preflight
from rl2.model.folder import check_length
from rl2.parallel.mesh import is_first_rank

TRIAL_ROWS = 1000  # rows that are read to show problems of the data beside those of the config


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
    inputs = _read_inputs(config, PROMPT_ROWS)
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
    inputs = Inputs(rows, problems=_find_unknown_stop_ids(config, template))
    return _make_examples(config, inputs, PROMPT_ROWS, template)


def read_examples(
    config: Any, kind: RowKind, template: ChatTemplate
) -> tuple[Examples, dict[str, Examples]]:
    """(the examples to train on; those of each test set by its name).

    ValueError lists all problems, or says that a row has more positions than the model.
    """
    train, tests = _make_examples(config, _read_inputs(config, kind), kind, template)
    assert train is not None
    return train, tests


def find_input_problems(config: Any) -> dict[str, str]:
    """Key -> problem, of the data and the environment of a config that has other problems.

    Only the first rows of files that are here are read.
    """
    kind = PAIR_ROWS
    if isinstance(config, PPOConfig):
        kind = PROMPT_ROWS
    elif isinstance(config, SFTConfig):
        kind = SFT_ROWS
    return _read_inputs(config, kind, TRIAL_ROWS).problems


def _read_inputs(config: Any, kind: RowKind, limit: int | None = None) -> Inputs:
    """Reads the rows, and for PPO the environment, which is tried on them.

    With a limit it leaves out what is not on this machine.
    """
    inputs = Inputs()
    data = config.data
    for key, path in {"data.path": data.path, **data.test_paths}.items():
        is_unused = key == "data.path" and config.trainer.eval_only and not data.test_ratio
        is_missing = not path or (limit and not Path(path).expanduser().exists())
        if is_unused or is_missing:
            continue
        split = "train" if key == "data.path" else "test"
        try:
            inputs.rows[key] = load_rows(path, split, kind.read, data.columns, limit)
        except ValueError as error:
            inputs.problems[key] = str(error)
    if isinstance(config, PPOConfig) and config.rollout.env_path:
        _read_env(inputs, config)
    return inputs


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
        inputs.warnings = preflight(inputs.env, inputs.rows, rollout.max_turns, rollout.partial)
    except ValueError as error:
        inputs.problems["rollout.env_path"] = str(error)


def _find_unknown_stop_ids(config: PPOConfig, template: ChatTemplate) -> dict[str, str]:
    """Key -> problem, of tokens that should end a turn and that the tokenizer does not have."""
    problems = {}
    last = max(template.tokenizer.get_vocab().values())
    for name in ("train_sampling_params", "test_sampling_params"):
        key = f"rollout.{name}.stop_token_ids"
        ids = getattr(config.rollout, name).stop_token_ids
        unknown = [token_id for token_id in ids if token_id > last]
        if unknown:
            problems[key] = (
                f"{key}={ids}: the tokenizer of {config.actor.model_name} has no token "
                f"{', '.join(map(str, unknown))}, its last one is {last}"
            )
    return problems


def _make_examples(
    config: Any, inputs: Inputs, kind: RowKind, template: ChatTemplate
) -> tuple[Examples | None, dict[str, Examples]]:
    """Tokenises the rows, and splits test rows off. Only training rows are shuffled.

    The name of a test set is that of data.test_path.NAME, or "".
    """
    data = config.data
    tests: dict[str, Examples] = {}
    for key, rows in inputs.rows.items():
        try:
            tests[key.removeprefix("data.test_path").removeprefix(".")] = Examples(
                rows,
                template,
                kind,
                max_length=data.max_length,
                truncate=isinstance(data, SFTDataConfig) and data.truncate,
                shuffle=data.shuffle and key == "data.path",
                seed=data.seed,
                batch_size=getattr(data, kind.batch_key.removeprefix("data.")),
            )
        except ValueError as error:
            inputs.problems[key] = str(error)
    inputs.check()
    for rows in inputs.rows.values():
        print_once(_warn_of_text_prompts(rows, template))
    print_once(_warn_of_trained_tests(data))
    train = tests.pop("data.path", None)
    if train is not None and data.test_ratio:
        tests[""] = train.split_off(data.test_ratio)
    for examples in tests.values():
        examples.kept = examples.kept[: data.test_limit]
        print_once(examples.describe_dropped("test "))
        _check_length(config, "test", examples)
    if train is not None:
        print_once(train.describe_dropped("training "))
    if train is None or config.trainer.eval_only:
        return None, tests
    _check_length(config, "train", train)
    return train, tests


def _warn_of_text_prompts(rows: Rows, template: ChatTemplate) -> list[str]:
    """A warning if the model has a chat template and prompts in plain text do not get it."""
    if NO_TEMPLATE not in rows.notes or not template.tokenizer.chat_template:
        return []
    count, _ = rows.notes[NO_TEMPLATE]
    return [
        f"warning: {rows.path}: the model has a chat template, and {count} of {len(rows)} prompts "
        "do not get it, since they are text: right for a base model; for a chat model write prompt "
        'as [{"role": "user", "content": TEXT}]'
    ]


def _warn_of_trained_tests(data: DataConfig) -> list[str]:
    """A warning for each test set in files that are also the training rows."""
    trained = hash_data(data.path, "train")
    warnings = []
    for key, path in data.test_paths.items():
        if trained and hash_data(path, "test") == trained:
            warnings.append(
                f"warning: {key}={path} has the rows that are trained: it shows what is memorised; "
                "data.test_ratio=0.1 keeps a tenth of the rows for the test"
            )
    return warnings


def _check_length(config: Any, split: str, examples: Examples) -> None:
    """ValueError if the longest sequence of the split has more positions than the model."""
    worker = worker_names(config)[0]
    length = examples.longest
    remedy = f"a row has {length} tokens: lower data.max_length"
    if isinstance(config, PPOConfig):
        max_turns = config.rollout.max_turns
        answer = getattr(config.rollout, f"{split}_sampling_params").max_new_tokens
        remedy = (
            f"a trajectory may get {length} (the longest {split} prompt) + {max_turns} x "
            f"{answer} tokens: lower rollout.{split}_sampling_params.max_new_tokens, "
            "data.max_length or rollout.max_turns"
        )
        length += max_turns * answer
    check_length(f"{worker}.model_name", getattr(config, worker).model_name, length, remedy)


def print_once(sentences: list[str]) -> None:
    """The first process prints the sentences, one a line."""
    for sentence in sentences if is_first_rank() else []:
        print(sentence)


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
