"""What PPO samples with: data, environments, tokenizer, and an engine that plays."""

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import AutoConfig, PreTrainedTokenizerBase

from rl2 import cleanup
from rl2.batch import Batch
from rl2.config.conditions import (
    adapter_obstacle,
    choose_exactness,
    count_samplers,
    exact_obstacles,
    has_full_kl,
    loads_teacher,
    needs_critic,
)
from rl2.config.engines import ENGINES, choose_engine
from rl2.config.schema import (
    ActorConfig,
    PPOConfig,
    RolloutConfig,
    SamplingConfig,
    teacher_model,
)
from rl2.data.chat import ChatTemplate
from rl2.data.examples import DataCursor, Examples, Mixture
from rl2.engine.base import (
    SHARE_BESIDE_TRAINER,
    SHARE_OF_OWN_GPU,
    Engine,
    EngineSettings,
    SamplingParams,
    default_max_running,
)
from rl2.env.call import Env
from rl2.env.contract import EnvFailures
from rl2.env.load import Functions
from rl2.gpu_memory import choose_for_device
from rl2.inputs import make_chat_template
from rl2.model.folder import (
    check_model,
    check_tokens,
    load_eos_token_ids,
    load_tokenizer,
    max_positions,
)
from rl2.model.token_model import TokenScores
from rl2.model.weight_files import check_weight_files
from rl2.parallel.device import compute_dtype
from rl2.parallel.mesh import init_distributed
from rl2.parallel.rank import is_first_rank
from rl2.parallel.worlds import Link, split_world
from rl2.ppo_inputs import make_prompts, make_templates, read_ppo_inputs
from rl2.rollout.collect import Collector
from rl2.rollout.evaluate import Evaluator
from rl2.rollout.player import Player
from rl2.rollout.sampling import Colocated
from rl2.rollout.schedule import GroupSchedule
from rl2.rollout.shape import Shape, add_overlong
from rl2.run.folder import RunFolder


class Teacher(Protocol):
    """What scores the sampled tokens: a model of this run, or a server."""

    def score(self, batch: Batch, temperature: float = 1.0) -> TokenScores: ...


@dataclass
class Setup:
    """What is ready before a model is loaded."""

    config: PPOConfig
    folder: RunFolder
    device: torch.device
    envs: dict[str, Env]  # by source; "" is that of all sources
    tokenizer: PreTrainedTokenizerBase
    templates: dict[str, ChatTemplate]  # by source, as the envs
    model_stop_ids: list[int]  # the model's own tokens that end a turn
    prompts: Mixture | None  # None in an evaluation
    tests: dict[str, Examples]  # by the name of the test set
    teacher_server: Teacher | None  # with teacher.base_url
    link: Link | None  # to the processes that only sample, or from them


def set_up(config: PPOConfig, functions: Functions | None = None) -> Setup:
    """Checks folder, data, environment and tokenizers. ValueError in words.

    `functions` are the environment, in the place of rollout.env_path.
    """
    device = init_distributed()
    choose_for_device(config, device)
    folder = RunFolder(config)
    tokenizer = load_tokenizer("actor.model_name", config.actor.model_name)
    if needs_critic(config.adv.estimator) and config.critic.model_name:
        check_model("critic.model_name", config.critic.model_name, critic=True)
    if loads_teacher(config):
        check_tokens("teacher.model_name", teacher_model(config).model_name, tokenizer)
    if config.trainer.eval_only and choose_engine(config.rollout.engine)[0] != "local":
        check_weight_files(config.actor.model_name)
    rows, envs = read_ppo_inputs(config, functions)
    num_samplers = count_samplers(config)
    link = split_world(num_samplers) if num_samplers else None
    is_training = not config.trainer.eval_only and not (link and link.is_sampler)
    template = make_chat_template(config.data, tokenizer, folder.start.date)
    if has_full_kl(config):
        check_teacher_vocabulary(config)
    templates = make_templates(config, envs, template)
    prompts, tests = make_prompts(config, rows, templates)
    teacher_server = None
    teacher = config.teacher
    if teacher.base_url and is_training:
        from rl2.teacher import connect

        teacher_server = connect(teacher.base_url, teacher.model_name, device)
    return Setup(
        config=config,
        folder=folder,
        device=device,
        envs=envs,
        tokenizer=tokenizer,
        templates=templates,
        model_stop_ids=template.stop_token_ids(load_eos_token_ids(config.actor.model_name)),
        prompts=prompts,
        tests=tests,
        teacher_server=teacher_server,
        link=link,
    )


def check_teacher_vocabulary(config: PPOConfig) -> None:
    """ValueError unless the parts of two vocabularies that are cut alike have the same tokens."""
    tp_size = config.actor.tp_size
    names = (config.actor.model_name, teacher_model(config).model_name)
    sizes = [AutoConfig.from_pretrained(name).get_text_config().vocab_size for name in names]
    if tp_size > 1 and sizes[0] != sizes[1]:
        raise ValueError(
            f"teacher.kl=full: the vocabulary is padded to {sizes[1]} tokens in {names[1]} and to "
            f"{sizes[0]} in {names[0]}, so actor.tp_size={tp_size} cuts it elsewhere: set "
            "actor.tp_size=1, or choose a teacher of the same size"
        )


def start_engine(setup: Setup, num_steps: int) -> Colocated:
    """Starts the engine of this process, with what plays the prompts and the test sets."""
    collector = _make_collector(setup, num_steps)
    section = setup.config.rollout.test_sampling_params
    params = _make_sampling_params(section, setup.model_stop_ids)
    num_samples = setup.config.data.responses_per_test_prompt
    return Colocated(collector, Evaluator(collector, setup.tests, params, num_samples))


def _make_collector(setup: Setup, num_steps: int) -> Collector:
    config, rollout = setup.config, setup.config.rollout
    is_deterministic = config.trainer.deterministic
    if is_deterministic is None:
        is_deterministic = setup.device.type == "cpu" and not rollout.partial
    new_collector: Callable[..., Collector] = Collector
    if rollout.partial:
        from rl2.rollout.partial import PartialCollector

        new_collector = partial(
            PartialCollector, num_steps=num_steps, max_staleness=rollout.max_staleness
        )
    new_schedule: Callable[..., GroupSchedule] = GroupSchedule
    if rollout.filter:
        from rl2.rollout.filter import FilteredSchedule

        new_schedule = partial(
            FilteredSchedule, bounds=rollout.filter, max_refills=rollout.max_refills
        )
    return new_collector(
        _make_player(setup, _make_engine(setup, is_deterministic)),
        cursor=None if setup.prompts is None else DataCursor(setup.prompts),
        params=_make_sampling_params(
            rollout.train_sampling_params,
            setup.model_stop_ids,
            with_candidates=True,
            experts_from=0 if config.actor.routing_replay else None,
        ),
        samples_per_prompt=config.data.responses_per_prompt,
        seed=config.trainer.seed,
        deterministic=is_deterministic,
        new_schedule=new_schedule,
        write_records=setup.folder.write_records,
        shapes=_choose_shapes(rollout),
    )


def _choose_shapes(rollout: RolloutConfig) -> list[Shape]:
    """What is added to the rewards of a step, in this order."""
    buffer = rollout.overlong_buffer
    if not isinstance(buffer, int):  # `derive_keys` has made auto a number
        return []
    return [
        partial(
            add_overlong,
            buffer=buffer,
            penalty=rollout.overlong_penalty,
            max_new_tokens=rollout.train_sampling_params.max_new_tokens,
        )
    ]


def _make_sampling_params(
    section: SamplingConfig,
    model_stop_ids: Iterable[int],
    with_candidates: bool = False,
    experts_from: int | None = None,
) -> SamplingParams:
    """A section of the config as the engine takes it, with the model's own stop tokens."""
    values = vars(section) | {"stop_token_ids": (*section.stop_token_ids, *model_stop_ids)}
    return SamplingParams(**values, with_candidates=with_candidates, experts_from=experts_from)


def _make_player(setup: Setup, engine: Engine) -> Player:
    config, rollout = setup.config, setup.config.rollout
    limits = [max_positions(config.actor.model_name)]
    for model in _scoring_models(config):  # which take whole trajectories
        limits.append(model.max_length_per_device * model.sp_size)
        limits.append(max_positions(model.model_name or config.actor.model_name))
    new_player: Callable[..., Player] = Player
    if any(env.spec.agent for env in setup.envs.values()):  # then all have one
        from rl2.agents.player import AgentPlayer

        new_player = partial(AgentPlayer, endpoint_host=rollout.endpoint_host)
    elif any(env.spec.step for env in setup.envs.values()):
        from rl2.rollout.text_player import TextPlayer

        new_player = TextPlayer
    return new_player(
        engine=engine,
        envs=setup.envs,
        templates=setup.templates,
        failures=EnvFailures(rollout.max_env_failures),
        max_turns=rollout.max_turns,
        max_length=min(limits),
        reward_weights=rollout.reward_weights,
        score=rollout.score,
    )


def _scoring_models(config: PPOConfig) -> list[Any]:
    """The sections of the models that score or train trajectories. The reference is the actor's."""
    if config.trainer.eval_only:
        return []
    models: list[Any] = [config.actor]
    if loads_teacher(config):
        models.append(teacher_model(config))
    if needs_critic(config.adv.estimator):
        models.append(config.critic)
    return models


def _make_engine(setup: Setup, is_deterministic: bool) -> Engine:
    config, rollout = setup.config, setup.config.rollout
    share = rollout.gpu_memory_utilization
    if share == "auto":
        share = SHARE_BESIDE_TRAINER if setup.link is None else SHARE_OF_OWN_GPU
    kind, reason = choose_engine(rollout.engine)
    settings = EngineSettings(
        model_name=config.actor.model_name,
        dtype=compute_dtype(config.actor.dtype, setup.device),
        device=setup.device,
        deterministic=is_deterministic,
        seed=config.trainer.seed,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        adapters=_choose_adapters(config),
        with_experts=config.actor.routing_replay and not config.trainer.eval_only,
        max_running_requests=rollout.max_running or default_max_running(kind, setup.device),
        exact=choose_exactness(config).is_on,
        tp_size=rollout.tp_size,
        gpu_memory_utilization=share,
        engine_args=rollout.engine_args,
        server_urls=rollout.server_urls,
        shared_dir=rollout.shared_dir or "",
        stop=rollout.train_sampling_params.stop + rollout.test_sampling_params.stop,
    )
    if is_first_rank():
        print(f"rollout engine: {kind}, {reason}")
        is_expected = kind == "local" and setup.device.type == "cpu" and rollout.exact is None
        if is_expected and not config.trainer.eval_only:
            for obstacle in exact_obstacles(config):
                print(f"log-probabilities of engine and trainer are not equal, with {obstacle}")
    engine: Engine = pkgutil.resolve_name(ENGINES[kind])(settings)
    cleanup.register(engine.close, at_exit=False)  # also where the run fails
    return engine


def _choose_adapters(config: PPOConfig) -> ActorConfig | None:
    """Whose adapters the engine applies. The first rank prints why it applies no adapters."""
    if not config.actor.lora_rank or config.trainer.eval_only:
        return None  # new adapters change nothing before they are trained
    obstacle = adapter_obstacle(config)
    if obstacle is None:
        return config.actor
    if is_first_rank():
        print(f"adapters are merged into the weights of the engine: {obstacle}")
    return None
