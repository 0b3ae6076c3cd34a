"""The checks of how prompts are played."""

from collections.abc import Iterator, Mapping
from typing import Any

from rl2.config.problem import Problem, wrong_value
from rl2.config.schema import PPOConfig, RolloutConfig
from rl2.user_files import find_env_file


def check_envs(rollout: RolloutConfig, row_paths: Mapping[str, Any]) -> Iterator[Problem]:
    """Whether there are the env files; if they have names, whether those are of all sources.

    `row_paths` are the keys that name the rows which are played, and their values.
    """
    for key, path in rollout.env_paths.items():
        if not isinstance(path, str):
            yield wrong_value(key, path, "expected a path or the name of a ready-made env")
            continue
        try:
            if path and find_env_file(path).suffix != ".py":  # a missing one is reported elsewhere
                yield wrong_value(key, path, "this is not a Python file (.py)")
        except ValueError as error:
            yield Problem(key, path, str(error))
    if isinstance(rollout.env_path, dict):
        yield from _check_env_names(rollout.env_path, row_paths)


def _check_env_names(env_path: dict[str, Any], row_paths: Mapping[str, Any]) -> Iterator[Problem]:
    sources: set[str] = set()
    for key, paths in row_paths.items():
        if isinstance(paths, dict):
            sources |= paths.keys()
        elif paths:
            reason = f"{key} has one path without a name; name it with {key}.NAME=PATH"
            yield wrong_value("rollout.env_path", env_path, reason)
            return
    known = ", ".join(sorted(sources))
    for name, path in env_path.items():
        if name not in sources:
            reason = f"no source and no test set has this name; they are {known}"
            yield wrong_value(f"rollout.env_path.{name}", path, reason)
    lacking = sorted(sources - env_path.keys())
    if lacking:
        remedy = f"set rollout.env_path.NAME=PATH for {', '.join(lacking)} too"
        yield wrong_value("rollout.env_path", env_path, f"sources without an env: {remedy}")


def find_equal_answers(config: PPOConfig) -> Iterator[Problem]:
    """A warning about several answers to a test prompt that are all the same."""
    num_answers = config.data.responses_per_test_prompt
    if num_answers > 1 and config.rollout.test_sampling_params.temperature == 0:
        reason = (
            "with rollout.test_sampling_params.temperature=0 the answers to a prompt are all the "
            "same; set a temperature, e.g. 1 as in training"
        )
        yield wrong_value("data.responses_per_test_prompt", num_answers, reason)
