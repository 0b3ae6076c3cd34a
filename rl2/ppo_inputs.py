"""Prompts and environment of PPO, read before a model is loaded: all problems come at once."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rl2.config.schema import PPOConfig, RolloutConfig, source_name
from rl2.data.chat import ChatTemplate
from rl2.data.examples import PROMPT_ROWS, Examples, Mixture
from rl2.data.rows import Rows
from rl2.env.call import Env
from rl2.env.load import Functions, load_env, make_env, preflight
from rl2.inputs import check_length, make_examples, read_rows
from rl2.parallel.rank import print_once

SAMPLING_SECTIONS = {"train": "train_sampling_params", "test": "test_sampling_params"}


def read_ppo_inputs(
    config: PPOConfig, functions: Functions | None = None
) -> tuple[dict[str, Rows], dict[str, Env]]:
    """(rows by key, environments by source) of a PPO run. ValueError lists all problems.

    The environment of the source "" is that of all sources. `functions` are the environment, in the
    place of rollout.env_path. The first process prints the warnings.
    """
    problems: list[str] = []
    rows = read_rows(config, PROMPT_ROWS, problems)
    envs, warnings = read_envs(config.rollout, rows, problems, functions)
    if problems:
        raise ValueError("\n".join(problems))
    print_once([f"warning: {warning}" for warning in warnings])
    return rows, envs


def make_templates(
    config: PPOConfig, envs: Mapping[str, Env], template: ChatTemplate
) -> dict[str, ChatTemplate]:
    """Returns the template of each source, with the system prompt of its env; prints which it is.

    With data.system_prompt that is the prompt of all sources, which `template` has.
    """
    if config.data.system_prompt is not None:
        key = "that of" if template.system_prompt else "none, as it is turned off by"
        print_once([f"system prompt: {key} data.system_prompt"])
        return dict.fromkeys(envs, template)
    for source, env in envs.items():
        if env.spec.system_prompt:
            of_source = f" of {source}" if source else ""
            print_once([f"system prompt{of_source}: that of {env.path}"])
    return {
        source: replace(template, system_prompt=env.spec.system_prompt)
        for source, env in envs.items()
    }


def make_prompts(
    config: PPOConfig, rows: dict[str, Rows], templates: Mapping[str, ChatTemplate]
) -> tuple[Mixture | None, dict[str, Examples]]:
    """(the prompts to train on, None in an evaluation; those of each test set by its name).

    The `templates` are by source, as environments. ValueError lists all problems, or says that a
    trajectory may get too long for the model.
    """
    train, tests = make_examples(config, rows, PROMPT_ROWS, templates, [])
    if config.trainer.eval_only:
        train = None
    for examples in tests.values():
        _check_trajectory_length(config, "test", examples.longest)
    if train is not None:
        _check_trajectory_length(config, "train", train.longest)
    return train, tests


def _check_trajectory_length(config: PPOConfig, split: str, longest_prompt: int) -> None:
    section = SAMPLING_SECTIONS[split]
    turns = config.rollout.max_turns
    answer = getattr(config.rollout, section).max_new_tokens
    remedy = (
        f"a trajectory may get {longest_prompt} (the longest {split} prompt) + {turns} x {answer} "
        f"tokens: lower rollout.{section}.max_new_tokens, data.max_length or rollout.max_turns"
    )
    check_length(config, longest_prompt + turns * answer, remedy)


def read_envs(
    rollout: RolloutConfig,
    rows: dict[str, Rows],
    problems: list[str],
    functions: Functions | None = None,
) -> tuple[dict[str, Env], list[str]]:
    """Loads the environments, and tries each on the rows of its source: (they, warnings).

    The environment of the source "" is that of all sources. What is wrong with one is added to the
    problems; then it may be missing. `functions` are the environment, in the place of
    rollout.env_path.
    """
    limits = (rollout.env_timeout, rollout.env_concurrency, rollout.env_isolation)
    envs: dict[str, Env] = {}
    warnings: list[str] = []
    for key, path in rollout.env_paths.items():
        source = source_name(key)
        rows_of_source = {
            rows_key: part
            for rows_key, part in rows.items()
            if source in ("", source_name(rows_key))
        }
        try:
            env = make_env(functions, *limits) if functions else load_env(path, *limits)
            envs[source] = env
            found = preflight(env, rows_of_source, rollout.max_turns, rollout.partial)
            warnings += [f"{key}: {warning}" if source else warning for warning in found]
        except ValueError as error:
            problems.append(f"{key}: {error}" if source else str(error))
    problems += _find_agent_problems(rollout, envs)
    return envs, warnings


def _find_agent_problems(rollout: RolloutConfig, envs: dict[str, Env]) -> Iterator[str]:
    """Problems of run() and play(): an endpoint without a key, and agents in some sources only."""
    host = rollout.endpoint_host
    if any(env.spec.run and "api_key" not in env.asked for env in envs.values()):
        from rl2.agents.endpoint import is_exposed

        if is_exposed(host):
            yield (
                f"rollout.endpoint_host={host}: others reach this address, so the model answers "
                "only with the key of the trajectory; run() must ask for it: add the argument "
                "api_key"
            )
    with_agent = [source for source, env in envs.items() if env.spec.agent]
    if 0 < len(with_agent) < len(envs):
        yield (
            f"rollout.env_path: the envs of {', '.join(with_agent)} have run() or play(), and the "
            "others have neither: take sources of one kind, or write one of the two for all"
        )
