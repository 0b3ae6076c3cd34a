"""From the config to workers, engine, environment and prompts: what PPO trains with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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
    has_full_kl,
    has_teacher,
    loads_teacher,
    needs_critic,
    needs_reference,
    old_policy_is_sampler,
    sends_adapters,
)
from rl2.config.schema import (
    ActorConfig,
    PPOConfig,
    RolloutConfig,
    RolloutWorkerConfig,
    SamplingConfig,
    teacher_model,
    worker_names,
)
from rl2.data.chat import ChatTemplate
from rl2.data.examples import DataCursor, Examples, Mixture
from rl2.engine.base import Engine, EngineSettings, SamplingParams
from rl2.engine.select import default_max_running, make_engine
from rl2.env.call import Env
from rl2.env.contract import EnvFailures
from rl2.env.load import Functions
from rl2.model.folder import (
    check_model,
    check_tokens,
    load_eos_token_ids,
    load_tokenizer,
    max_positions,
)
from rl2.model.token_model import TokenScores
from rl2.parallel.device import compute_dtype
from rl2.parallel.mesh import init_distributed
from rl2.parallel.rank import is_first_rank
from rl2.parallel.worlds import Link, split_world
from rl2.report.loggers import MetricsLog
from rl2.rollout.collect import Collector
from rl2.rollout.evaluate import Evaluator
from rl2.rollout.overlap import Samplers, Serving, serve
from rl2.rollout.player import Player
from rl2.rollout.sampling import Colocated, Sampling
from rl2.rollout.saved import SavedRollouts, StartModel, hash_tokens, pack_tokens
from rl2.rollout.shape import Shape, add_overlong
from rl2.rollout.trajectory import Trajectory
from rl2.run.checkpoints import Parts
from rl2.run.folder import RunFolder
from rl2.run.signals import StopSignal
from rl2.trainer.inputs import check_lora, count_steps, make_chat_template
from rl2.trainer.ppo_inputs import make_prompts, read_ppo_inputs
from rl2.trainer.recorder import Recorder
from rl2.worker import Reference, Worker

# What rollout.gpu_memory_utilization=auto is. The rest is for the engine to compute, and beside a
# trainer for the weights that it sends.
SHARE_BESIDE_TRAINER = 0.6
SHARE_OF_OWN_GPU = 0.85


class Teacher(Protocol):
    """What scores the sampled tokens: a model of this run, or a server."""

    def infer(self, batch: Batch, temperature: float = 1.0) -> TokenScores: ...


@dataclass
class Models:
    """The models of a run that lie in the processes that train."""

    actor: Worker
    critic: Worker | None
    reference: Worker | Reference | None
    teacher: Worker | None

    @property
    def trained(self) -> dict[str, Worker]:
        """The workers that are updated, by the name of their section."""
        trained = {"actor": self.actor}
        return trained if self.critic is None else trained | {"critic": self.critic}


@dataclass
class Setup:
    """What is ready before a model is loaded."""

    config: PPOConfig
    folder: RunFolder
    device: torch.device
    envs: dict[str, Env]  # by source; "" is that of all sources
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    model_stop_ids: list[int]  # the model's own tokens that end a turn
    prompts: Examples | Mixture | None  # None in an evaluation
    tests: dict[str, Examples]  # by the name of the test set
    teacher_server: Teacher | None  # with teacher.base_url
    link: Link | None  # to the processes that only sample, or from them


def set_up(config: PPOConfig, functions: Functions | None = None, num_samplers: int = 0) -> Setup:
    """Checks folder, data, environment and tokenizers. ValueError in words.

    `functions` are the environment, in the place of rollout.env_path. The last `num_samplers`
    processes of the job get a world of their own.
    """
    device = init_distributed()
    folder = RunFolder(config)
    tokenizer = load_tokenizer("actor.model_name", config.actor.model_name)
    if needs_critic(config.adv.estimator) and config.critic.model_name:
        check_model("critic.model_name", config.critic.model_name, critic=True)
    if loads_teacher(config):
        check_tokens("teacher.model_name", config.teacher.model_name, tokenizer)
    check_lora(config)
    rows, envs = read_ppo_inputs(config, functions)
    link = split_world(num_samplers) if num_samplers else None
    is_training = not config.trainer.eval_only and not (link and link.is_sampler)
    template = make_chat_template(config.data, tokenizer, folder.start.date)
    if has_full_kl(config):
        check_teacher_vocabulary(config)
    prompts, tests = make_prompts(config, rows, template)
    teacher_server = None
    if config.teacher.base_url and is_training:
        from rl2.trainer.teacher import connect

        teacher = config.teacher
        teacher_server = connect(teacher.base_url, teacher.protocol, teacher.model_name, device)
    return Setup(
        config=config,
        folder=folder,
        device=device,
        envs=envs,
        tokenizer=tokenizer,
        template=template,
        model_stop_ids=template.stop_token_ids(load_eos_token_ids(config.actor.model_name)),
        prompts=prompts,
        tests=tests,
        teacher_server=teacher_server,
        link=link,
    )


def check_teacher_vocabulary(config: PPOConfig) -> None:
    """ValueError unless the parts of two vocabularies that are cut alike have the same tokens."""
    tp_size, names = config.actor.tp_size, (config.actor.model_name, config.teacher.model_name)
    sizes = [AutoConfig.from_pretrained(name).get_text_config().vocab_size for name in names]
    if tp_size > 1 and sizes[0] != sizes[1]:
        raise ValueError(
            f"teacher.kl=full: the vocabulary is padded to {sizes[1]} tokens in {names[1]} and to "
            f"{sizes[0]} in {names[0]}, so actor.tp_size={tp_size} cuts it elsewhere: set "
            "actor.tp_size=1, or choose a teacher of the same size"
        )


class PPORun:
    """What PPO's `train` works with."""

    def __init__(self, config: PPOConfig, functions: Functions | None = None):
        """`functions` are the environment, in the place of rollout.env_path."""
        setup = set_up(config, functions, count_samplers(config))
        assert setup.prompts is not None
        self.config = config
        self.folder = setup.folder
        self.tokens_hash = hash_tokens(
            setup.tokenizer, config.rollout.train_sampling_params.temperature
        )
        self.tokens: dict[str, Any] = {}  # of the last rollout, if they are kept
        saved = self._open_saved_rollouts()
        if saved is None:
            num_steps = count_steps(setup.prompts, self.folder)
        else:
            num_steps = self.folder.count_steps(saved.num_steps, batch_size=1)
            self.folder.end_if_done(num_steps)
        num_updates = {
            name: self.folder.count_updates(name, num_steps) for name in worker_names(config)
        }
        models = make_models(config, setup.device, num_updates)
        self.actor, self.critic, self.reference = models.actor, models.critic, models.reference
        has_full = has_full_kl(config)
        # The teacher that runs in the updates, and what scores the sampled tokens before them: a
        # server, a model, or with a hint alone the actor.
        self.full_kl_teacher = models.teacher if has_full else None
        self.scoring_teacher: Teacher | None = None
        if has_teacher(config) and not has_full:
            self.scoring_teacher = setup.teacher_server or models.teacher or self.actor
        self.sends_adapters = sends_adapters(config)
        self.sampling: Sampling
        if saved is not None:
            self.sampling = saved
        elif setup.link is not None:
            self.sampling = self._make_samplers(setup.link, num_steps)
        else:
            self.sampling = start_engine(setup, num_steps)
        parts: Parts = {"data": self.sampling}
        if config.kl.update_freq:
            parts["reference"] = self.moving_reference()
        self.recorder = Recorder(
            self.folder,
            setup.tokenizer,
            models.trained,
            parts,
            num_steps=num_steps,
            device=setup.device,
            evaluate=self.evaluate if setup.tests and saved is None else None,
        )

    def _make_samplers(self, link: Link, num_steps: int) -> Samplers:
        return Samplers(
            link,
            num_steps,
            max_staleness=self.config.rollout.max_staleness or 1,
            old_policy_is_sampler=old_policy_is_sampler(self.config),
            write_records=self.folder.write_records,
            request_stop=self._request_stop,
        )

    def _open_saved_rollouts(self) -> SavedRollouts | None:
        actor, path = self.config.actor, self.config.trainer.rollouts_from
        if not path:
            return None
        start_model = StartModel(actor.model_name, actor.adapter, actor.quantize_base)
        return SavedRollouts(path, start_model, self.tokens_hash, actor.routing_replay)

    def begin(self) -> None:
        """Brings engine and actor to the same weights, and evaluates before the first step."""
        self.sampling.begin()
        actor = self.config.actor
        if self.sends_adapters:  # which only the actor has drawn or read
            self._send_weights()
            self._verify_weights()
        elif self.recorder.start_step > 0 or actor.adapter or actor.quantize_base:
            self._send_weights()  # the actor has other ones than the files
        else:  # both have read the same files, so they must agree to the bit
            self._verify_weights()
        self.recorder.begin()

    def collect(self, step: int) -> list[Trajectory]:
        """The trajectories of a step. An engine in this process sleeps afterwards."""
        trajectories = self.sampling.collect(step)
        if self.config.trainer.save_tokens and self.folder.is_first:
            self.tokens = pack_tokens(trajectories, self.tokens_hash)
        return trajectories

    def moving_reference(self) -> Worker:
        """Returns the reference of kl.update_freq, which has weights of its own."""
        assert isinstance(self.reference, Worker), "kl.update_freq is refused with adapters"
        return self.reference

    def wait_for_samplers(self) -> None:
        """Waits for the rollout of the next step, with rollout.num_processes."""
        if isinstance(self.sampling, Samplers):
            with self.recorder.phase("wait"):
                self.sampling.wait()

    def _request_stop(self) -> None:
        """Ends the run after this step, since a sampler was asked to stop."""
        if self.recorder.stop_signal.requested_at is None:
            self.recorder.stop_signal.request()

    def sync(self, step: int) -> None:
        """Wakes the engine with the actor's weights of `step`, and compares the first ones."""
        self.sampling.wake()
        self._send_weights()
        if self.config.rollout.check_weights or step == self.recorder.start_step + 1:
            self._verify_weights()

    def _send_weights(self) -> None:
        """Sends the engine what an update has changed: all weights, or the adapters alone."""
        actor = self.actor
        changed = actor.iter_trained_weights if self.sends_adapters else actor.iter_full_weights
        self.sampling.load_weights(changed(actor.dtype), actor.version)

    def _verify_weights(self) -> None:
        """Compares all weights; adapters are merged in unless they are sent apart."""
        actor = self.actor
        whole = actor.iter_unmerged_weights if self.sends_adapters else actor.iter_full_weights
        self.sampling.verify_weights(whole(actor.dtype), actor.version)

    def evaluate(self, step: int) -> dict[str, float]:
        """Plays the test sets and writes their transcripts. Returns their metrics."""
        return self.sampling.evaluate(step, self.actor.version)

    def close(self) -> None:
        """Ends the engines and the environment."""
        self.sampling.close()

    def finish(self) -> None:
        """Ends the engine and the environment, and saves the final model."""
        self.close()
        self.recorder.finish(self.actor)


class SamplerRun:
    """What a process of rollout.num_processes does while the others train: it samples for them."""

    def __init__(self, config: PPOConfig, functions: Functions | None = None):
        """`functions` are the environment, in the place of rollout.env_path."""
        setup = set_up(config, functions, count_samplers(config))
        assert setup.prompts is not None and setup.link is not None
        self.sampling = start_engine(setup, count_steps(setup.prompts, setup.folder))
        self.stop_signal = StopSignal(setup.device)
        collector, evaluator = self.sampling.collector, self.sampling.evaluator
        self.serving = Serving(setup.link, collector, evaluator, self._listen)

    def _listen(self) -> Callable[[], bool]:
        """Lets a signal ask for a stop from here on. Returns whether one has."""
        self.stop_signal.listen()
        return lambda: self.stop_signal.requested_at is not None

    def run(self) -> None:
        """Serves the trainers until they close, and ends the engine and the environment."""
        serve(self.serving)
        self.sampling.close()
        dist.destroy_process_group()


class EvaluationRun:
    """The run of trainer.eval_only=true: an engine that plays the test sets once."""

    def __init__(self, config: PPOConfig, functions: Functions | None = None):
        """ValueError if the folder has checkpoints: it belongs to a run that trains.

        `functions` are the environment, in the place of rollout.env_path.
        """
        setup = set_up(config, functions)
        self.folder = setup.folder
        if self.folder.start.checkpoint is not None:
            raise ValueError(
                f"{self.folder.path} is the folder of a run that trains; give the evaluation one "
                "of its own with trainer.experiment_name=NAME"
            )
        self.sampling = start_engine(setup, num_steps=0)

    def run(self) -> None:
        """Evaluates, prints a table, and ends the engine and the environment."""
        folder = self.folder
        folder.resume({}, num_steps=0)
        log = MetricsLog(folder.path, folder.config, start_step=0, num_steps=0)
        with log.phase("test"):
            metrics = self.sampling.evaluate(step=0, version=0)
        line = {f"test/{name}": value for name, value in metrics.items()}
        log.write(0, line)
        log.close()
        if is_first_rank():
            print(self.sampling.evaluator.describe(metrics))
        self.sampling.close()
        dist.destroy_process_group()


def make_models(
    config: PPOConfig,
    device: torch.device,
    num_updates: dict[str, int],
    new_worker: Callable[..., Worker] = Worker,
) -> Models:
    """Loads the models. `num_updates` of actor and critic are those of the whole run."""

    def count_updates(name: str, section: RolloutWorkerConfig) -> int:
        # Not 0: a worker that is frozen in all steps of this run may be trained in later ones.
        return max(num_updates[name], section.updates_per_step)

    exactness = choose_exactness(config)
    torch.manual_seed(config.trainer.seed)  # of new weights
    actor = new_worker(
        config.actor,
        device,
        num_updates=count_updates("actor", config.actor),
        exactness=exactness,
    )
    reference = actor.reference() if needs_reference(config) else None
    teacher = critic = None
    if loads_teacher(config):
        section: Any = teacher_model(config)  # without the keys that a frozen worker does not read
        teacher = new_worker(section, device, exactness=exactness)
    if needs_critic(config.adv.estimator):
        model_name = config.critic.model_name or config.actor.model_name
        section = replace(config.critic, model_name=model_name)
        num_critic_updates = count_updates("critic", section)
        critic = new_worker(section, device, critic=True, num_updates=num_critic_updates)
    return Models(actor, critic, reference, teacher)


def start_engine(setup: Setup, num_steps: int) -> Colocated:
    """Starts the engine of this process, with what plays the prompts and the test sets."""
    collector = _make_collector(setup, num_steps)
    section = setup.config.rollout.test_sampling_params
    params = _make_sampling_params(section, setup.model_stop_ids)
    num_samples = setup.config.data.responses_per_test_prompt
    return Colocated(collector, Evaluator(collector, setup.tests, params, num_samples))


def _make_collector(setup: Setup, num_steps: int) -> Collector:
    config, rollout = setup.config, setup.config.rollout
    add_hints = None
    if config.teacher.hint:
        from rl2.trainer.teacher import Hint

        add_hints = Hint(config.teacher.hint, setup.template).add_teacher_prompts
    is_deterministic = config.trainer.deterministic
    if is_deterministic is None:
        is_deterministic = setup.device.type == "cpu" and not rollout.partial
    return Collector(
        _make_player(setup, _make_engine(setup, is_deterministic)),
        cursor=None if setup.prompts is None else DataCursor(setup.prompts),
        params=_make_sampling_params(
            rollout.train_sampling_params,
            setup.model_stop_ids,
            with_candidates=True,
            experts_from=0 if config.actor.routing_replay else None,
        ),
        samples_per_prompt=config.data.responses_per_prompt,
        num_steps=num_steps,
        seed=config.trainer.seed,
        deterministic=is_deterministic,
        partial=rollout.partial,
        filter=rollout.filter,
        max_refills=rollout.max_refills,
        max_staleness=rollout.max_staleness,
        write_records=setup.folder.write_records,
        add_hints=add_hints,
        shapes=_choose_shapes(rollout),
    )


def _choose_shapes(rollout: RolloutConfig) -> list[Shape]:
    """What is added to the rewards of a step, in this order."""
    if rollout.overlong_buffer is None:
        return []
    return [
        partial(
            add_overlong,
            buffer=rollout.overlong_buffer,
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
    return new_player(
        engine=engine,
        envs=setup.envs,
        template=setup.template,
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
    max_running = rollout.max_running or default_max_running(rollout.engine, setup.device)
    settings = EngineSettings(
        model_name=config.actor.model_name,
        dtype=compute_dtype(config.actor.dtype, setup.device),
        head_dtype=getattr(torch, config.actor.head_dtype),
        device=setup.device,
        deterministic=is_deterministic,
        seed=config.trainer.seed,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        adapters=_choose_adapters(config),
        with_experts=config.actor.routing_replay and not config.trainer.eval_only,
        max_running_requests=max_running,
        exact=choose_exactness(config).is_on,
        tp_size=rollout.tp_size,
        gpu_memory_utilization=share,
        engine_args=rollout.engine_args,
        stop=rollout.train_sampling_params.stop + rollout.test_sampling_params.stop,
    )
    engine = make_engine(rollout.engine, settings)
    cleanup.register(engine.close, at_exit=False)  # also where the run fails
    return engine


def _choose_adapters(config: PPOConfig) -> ActorConfig | None:
    """Whose adapters the engine applies. The first rank prints why it applies no adapters."""
    if not config.actor.lora_rank or (config.trainer.eval_only and not config.actor.adapter):
        return None  # new adapters change nothing before they are trained
    obstacle = adapter_obstacle(config)
    if obstacle is None:
        return config.actor
    if is_first_rank():
        print(f"adapters are merged into the weights of the engine: {obstacle}")
    return None
