"""What plays prompts: environments, engine and player."""

from collections.abc import Iterable

from rl2.config.problem import Problem, wrong_value
from rl2.config.schema import PPOConfig, RolloutConfig, SamplingConfig, source_name
from rl2.data.chat import ChatTemplate
from rl2.data.rows import Rows
from rl2.engine.base import SamplingParams
from rl2.env.call import Env
from rl2.env.load import Functions, load_env, make_env, preflight
from rl2.rollout.endpoint import LOCAL_HOST, is_exposed

SAMPLING_SECTIONS = {"train": "train_sampling_params", "test": "test_sampling_params"}


def read_envs(
    rollout: RolloutConfig,
    rows: dict[str, Rows],
    problems: list[Problem],
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
            problems.append(Problem(key, path, f"{key}: {error}" if source else str(error)))
    problems += _find_agent_problems(rollout, envs)
    has_run = any(env.spec.run is not None for env in envs.values())
    if rollout.endpoint_host != LOCAL_HOST and envs and not has_run:
        warnings.append("rollout.endpoint_host has no effect: the env file has no agent, run()")
    return envs, warnings


def _find_agent_problems(rollout: RolloutConfig, envs: dict[str, Env]) -> list[Problem]:
    """Problems of run() and play(): an endpoint without a key, and agents in some sources only."""
    problems = []
    host = rollout.endpoint_host
    runs = [env for env in envs.values() if env.spec.run is not None]
    if is_exposed(host) and any("api_key" not in env.asked for env in runs):
        text = (
            f"rollout.endpoint_host={host}: others reach this address, so the model answers only "
            "with the key of the trajectory; run() must ask for it: add the argument api_key"
        )
        problems.append(Problem("rollout.endpoint_host", host, text))
    with_agent = [source for source, env in envs.items() if env.spec.agent]
    if 0 < len(with_agent) < len(envs):
        text = (
            f"rollout.env_path: the envs of {', '.join(with_agent)} have run() or play(), and the "
            "others have neither: take sources of one kind, or write one of the two for all"
        )
        problems.append(Problem("rollout.env_path", rollout.env_path, text))
    return problems


def find_unknown_stop_ids(config: PPOConfig, template: ChatTemplate) -> list[Problem]:
    """The problems of tokens that should end a turn and that the tokenizer does not have."""
    problems = []
    last = template.last_token_id
    for section in SAMPLING_SECTIONS.values():
        key = f"rollout.{section}.stop_token_ids"
        ids = getattr(config.rollout, section).stop_token_ids
        unknown = [token_id for token_id in ids if token_id > last]
        if unknown:
            reason = (
                f"the tokenizer of {config.actor.model_name} has no token "
                f"{', '.join(map(str, unknown))}, its last one is {last}"
            )
            problems.append(wrong_value(key, ids, reason))
    return problems


def make_sampling_params(
    section: SamplingConfig,
    model_stop_ids: Iterable[int],
    with_candidates: bool = False,
    experts_from: int | None = None,
) -> SamplingParams:
    """A section of the config as the engine takes it, with the model's own stop tokens."""
    values = vars(section) | {"stop_token_ids": (*section.stop_token_ids, *model_stop_ids)}
    return SamplingParams(**values, with_candidates=with_candidates, experts_from=experts_from)
