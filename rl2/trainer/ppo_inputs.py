"""Prompts and environment of PPO, read before a model is loaded: all problems come at once."""

from collections.abc import Iterator

from rl2.config.problem import Problem, wrong_value
from rl2.config.schema import PPOConfig
from rl2.data.chat import ChatTemplate
from rl2.data.examples import PROMPT_ROWS, Examples, Mixture
from rl2.data.rows import Rows
from rl2.env.call import Env
from rl2.env.load import Functions, load_env, make_env, preflight
from rl2.model.folder import check_token_ids
from rl2.trainer.inputs import TRIAL_ROWS, check_length, make_examples, print_once, read_rows

SAMPLING_SECTIONS = {"train": "train_sampling_params", "test": "test_sampling_params"}


def read_ppo_inputs(
    config: PPOConfig, functions: Functions | None = None
) -> tuple[dict[str, Rows], Env]:
    """(rows by key, environment) of a PPO run. ValueError lists all problems.

    `functions` are the environment, in the place of rollout.env_path. The first process prints the
    warnings.
    """
    rows, problems = read_rows(config, PROMPT_ROWS)
    env, warnings = _read_env(config, rows, problems, functions)
    if problems:
        raise ValueError("\n".join(map(str, problems)))
    print_once([f"warning: {warning}" for warning in warnings])
    assert env is not None
    return rows, env


def find_ppo_problems(config: PPOConfig, functions: Functions | None = None) -> list[Problem]:
    """The problems of the data and the environment, for a config that has other problems.

    Only the first rows of files that are on this machine are read.
    """
    rows, problems = read_rows(config, PROMPT_ROWS, TRIAL_ROWS)
    if config.rollout.env_path:
        _read_env(config, rows, problems, functions)
    return problems


def _read_env(
    config: PPOConfig,
    rows: dict[str, Rows],
    problems: list[Problem],
    functions: Functions | None,
) -> tuple[Env | None, list[str]]:
    """Loads the environment and tries it on the rows: (it, warnings about it).

    What is wrong with it is added to the problems; then there may be no environment.
    """
    rollout = config.rollout
    env: Env | None = None
    try:
        limits = (rollout.env_timeout, rollout.env_concurrency, rollout.env_isolation)
        if functions:
            env = make_env(functions, *limits)
        else:
            env = load_env(rollout.env_path, *limits)
        return env, preflight(env, rows, rollout.max_turns, rollout.partial)
    except ValueError as error:
        problems.append(Problem("rollout.env_path", rollout.env_path, str(error)))
        return env, []


def make_prompts(
    config: PPOConfig, rows: dict[str, Rows], template: ChatTemplate
) -> tuple[Examples | Mixture | None, dict[str, Examples]]:
    """(the prompts to train on, None in an evaluation; those of each test set by its name).

    ValueError lists all problems, or says that a trajectory may get too long for the model.
    """
    problems = _find_unknown_stop_ids(config, template)
    train, tests = make_examples(config, rows, PROMPT_ROWS, template, problems)
    if config.trainer.eval_only:
        train = None
    for examples in tests.values():
        _check_trajectory_length(config, "test", examples)
    if train is not None:
        _check_trajectory_length(config, "train", train)
    return train, tests


def _check_trajectory_length(config: PPOConfig, split: str, prompts: Examples | Mixture) -> None:
    section = SAMPLING_SECTIONS[split]
    turns = config.rollout.max_turns
    answer = getattr(config.rollout, section).max_new_tokens
    remedy = (
        f"a trajectory may get {prompts.longest} (the longest {split} prompt) + {turns} x {answer} "
        f"tokens: lower rollout.{section}.max_new_tokens, data.max_length or rollout.max_turns"
    )
    check_length(config, prompts, remedy, turns * answer)


def _find_unknown_stop_ids(config: PPOConfig, template: ChatTemplate) -> list[Problem]:
    """The problems of tokens that should end a turn and that the tokenizer does not have."""
    problems = []
    last = max(template.tokenizer.get_vocab().values())
    for key, ids in _stop_ids(config):
        unknown = [token_id for token_id in ids if token_id > last]
        if unknown:
            reason = (
                f"the tokenizer of {config.actor.model_name} has no token "
                f"{', '.join(map(str, unknown))}, its last one is {last}"
            )
            problems.append(wrong_value(key, ids, reason))
    return problems


def check_stop_ids(config: PPOConfig) -> None:
    """ValueError for tokens that should end a turn and that the model does not have."""
    for key, ids in _stop_ids(config):
        check_token_ids(key, config.actor.model_name, ids)


def _stop_ids(config: PPOConfig) -> Iterator[tuple[str, list[int]]]:
    """Yields the keys of the tokens that should end a turn, and these tokens."""
    for section in SAMPLING_SECTIONS.values():
        ids = getattr(config.rollout, section).stop_token_ids
        yield f"rollout.{section}.stop_token_ids", ids
