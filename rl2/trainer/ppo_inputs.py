"""Prompts and environment of PPO, read before a model is loaded: all problems come at once."""

from collections.abc import Iterator

from rl2.config.problem import Problem, wrong_value
from rl2.config.schema import PPOConfig, source_name
from rl2.data.chat import ChatTemplate
from rl2.data.examples import PROMPT_ROWS, Examples, Mixture
from rl2.data.rows import Rows
from rl2.env.call import Env
from rl2.env.load import Functions, load_env, make_env, preflight
from rl2.model.folder import check_token_ids
from rl2.rollout.hint import fill_in
from rl2.trainer.inputs import (
    TRIAL_ROWS,
    check_length,
    make_examples,
    print_once,
    read_rows,
)

SAMPLING_SECTIONS = {"train": "train_sampling_params", "test": "test_sampling_params"}


def read_ppo_inputs(
    config: PPOConfig, functions: Functions | None = None
) -> tuple[dict[str, Rows], dict[str, Env]]:
    """(rows by key, environments by source) of a PPO run. ValueError lists all problems.

    The environment of the source "" is that of all sources. `functions` are the environment, in the
    place of rollout.env_path. The first process prints the warnings.
    """
    rows, problems = read_rows(config, PROMPT_ROWS)
    envs, warnings = _read_envs(config, rows, problems, functions)
    if problems:
        raise ValueError("\n".join(map(str, problems)))
    print_once([f"warning: {warning}" for warning in warnings])
    return rows, envs


def find_ppo_problems(config: PPOConfig, functions: Functions | None = None) -> list[Problem]:
    """The problems of the data and the environment, for a config that has other problems.

    Only the first rows of files that are on this machine are read.
    """
    rows, problems = read_rows(config, PROMPT_ROWS, TRIAL_ROWS)
    if config.rollout.env_path:
        _read_envs(config, rows, problems, functions)
    return problems


def _read_envs(
    config: PPOConfig,
    rows: dict[str, Rows],
    problems: list[Problem],
    functions: Functions | None,
) -> tuple[dict[str, Env], list[str]]:
    """Loads the environments, and tries each on the rows of its source: (they, warnings).

    What is wrong with one is added to the problems; then it may be missing.
    """
    rollout = config.rollout
    limits = (rollout.env_timeout, rollout.env_concurrency, rollout.env_isolation)
    envs: dict[str, Env] = {}
    warnings: list[str] = []
    for key, path in rollout.env_paths.items():
        name = source_name(key)
        own_rows = {k: of_key for k, of_key in rows.items() if name in ("", source_name(k))}
        try:
            envs[name] = make_env(functions, *limits) if functions else load_env(path, *limits)
            found = preflight(envs[name], own_rows, rollout.max_turns, rollout.partial)
            warnings += [f"{key}: {warning}" if name else warning for warning in found]
        except ValueError as error:
            problems.append(Problem(key, path, f"{key}: {error}" if name else str(error)))
    agents = [name for name, env in envs.items() if env.spec.run is not None]
    if 0 < len(agents) < len(envs):
        text = (
            f"rollout.env_path: the envs of {', '.join(agents)} have an agent, run(), and the "
            "others have none: train on sources of one kind, or write run() for all"
        )
        problems.append(Problem("rollout.env_path", rollout.env_path, text))
    problems += _find_hint_problems(config, rows, list(envs.values()))
    return envs, warnings


def _find_hint_problems(
    config: PPOConfig, rows: dict[str, Rows], envs: list[Env]
) -> Iterator[Problem]:
    """Whether the first row of each source fills the teacher's hint, and prompts are the data's."""
    hint = config.teacher.hint
    if not hint:
        return
    if any(env.has_object or env.spec.run is not None for env in envs):
        reason = "the environment's make_env or run makes the prompts, which get no hint"
        yield wrong_value("teacher.hint", hint, reason)
    for key, of_key in rows.items():
        if key in config.data.train_paths and len(of_key):
            try:
                fill_in(hint, of_key[0])
            except ValueError as error:
                yield Problem("teacher.hint", hint, str(error))


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
