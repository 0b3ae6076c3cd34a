"""Rows as examples, read before a model is loaded: all problems of the data come at once."""

from collections.abc import Mapping
from datetime import date

from transformers import PreTrainedTokenizerBase

from rl2.config.schema import (
    Config,
    DataConfig,
    model_name,
    source_name,
    worker_names,
)
from rl2.data.chat import ChatTemplate
from rl2.data.examples import Examples, Mixture, RowKind, describe_steps, hold_out
from rl2.data.rows import Rows, load_rows
from rl2.model.folder import check_length as check_num_positions
from rl2.parallel.rank import print_once
from rl2.rewards.text import BOXED_PROMPT, THINK_ANSWER_PROMPT
from rl2.run.folder import RunFolder

SYSTEM_PROMPTS = {"boxed": BOXED_PROMPT, "think_answer": THINK_ANSWER_PROMPT}


def read_rows(config: Config, kind: RowKind, problems: list[str]) -> dict[str, Rows]:
    """The rows of each source and of each test set, by key. Adds to `problems`."""
    data = config.data
    trained = data.train_paths
    if config.trainer.eval_only and not data.test_ratio:
        trained = {}
    rows: dict[str, Rows] = {}
    for split, paths in {"train": trained, "test": data.test_paths}.items():
        for key, path in paths.items():
            try:
                rows[key] = load_rows(path, split, kind.read, data.columns)
            except ValueError as error:
                problems.append(f"{key}: {error}")
    return rows


def read_examples(
    config: Config,
    kind: RowKind,
    template: ChatTemplate,
) -> tuple[Mixture, dict[str, Examples]]:
    """(the examples to train on; those of each test set by its name).

    ValueError lists all problems, or says that a row has more positions than the model.
    """
    problems: list[str] = []
    rows = read_rows(config, kind, problems)
    train, tests = make_examples(config, rows, kind, {"": template}, problems)
    assert train is not None
    longest = max([train.longest] + [examples.longest for examples in tests.values()])
    check_length(config, longest, f"a row has {longest} tokens: lower data.max_length")
    return train, tests


def make_examples(
    config: Config,
    rows: dict[str, Rows],
    kind: RowKind,
    templates: Mapping[str, ChatTemplate],
    problems: list[str],
) -> tuple[Mixture | None, dict[str, Examples]]:
    """Tokenises the rows, and splits test rows off: (training examples, test sets by name).

    The training examples are None if there are no rows of data.path. The name of a test set is that
    of data.test_path.NAME, or "". Rows that are held out of a source are a set with its name. The
    `templates` are by source; "" is that of sources that are not named. ValueError lists the
    `problems` and those found here.
    """
    data = config.data
    sources: dict[str, Examples] = {}
    tests: dict[str, Examples] = {}
    for key, path_rows in rows.items():
        name = source_name(key)
        part = sources if key in data.train_paths else tests
        template = templates.get(name) or templates[""]
        try:
            part[name] = Examples(
                path_rows, template, kind, max_length=data.max_length, source=name
            )
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    if sources and data.test_ratio:
        tests = hold_out(sources, data.test_ratio)
    for split, sets in {"test": tests, "training": sources}.items():
        for examples in sets.values():
            print_once(examples.describe_dropped(split))
    if not sources:
        return None, tests
    batch_size = getattr(data, kind.batch_key.removeprefix("data."))
    train = Mixture(sources, shuffle=data.shuffle, seed=data.seed, batch_size=batch_size)
    return train, tests


def check_length(config: Config, num_tokens: int, remedy: str) -> None:
    """ValueError, with the remedy, if sequences may have more tokens than the model positions."""
    worker = worker_names(config)[0]
    key = f"{worker}.model_name"
    check_num_positions(key, model_name(config, worker), num_tokens, remedy)


def count_steps(examples: Mixture, folder: RunFolder) -> int:
    """Returns the steps of a run over `examples`, and prints how it uses them.

    Ends the program if all of them are done.
    """
    steps = folder.count_steps(len(examples), examples.batch_size)
    folder.end_if_done(steps)
    print_once(describe_steps(examples, steps))
    return steps


def make_chat_template(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, day: str
) -> ChatTemplate:
    """The chat template of a run that first started on `day`, YYYY-MM-DD. ValueError in words."""
    return ChatTemplate(
        tokenizer,
        data.chat_template,
        data.chat_template_kwargs,
        read_system_prompt(data),
        date.fromisoformat(day),
    )


def read_system_prompt(data: DataConfig) -> str | None:
    """The text of data.system_prompt; None if there is none."""
    if data.system_prompt_file is not None:
        return data.system_prompt_file.read_text("utf-8").strip() or None
    value = data.system_prompt
    return SYSTEM_PROMPTS.get(value, value) if value else None
