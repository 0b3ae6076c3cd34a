"""From the config to workers, engine, environment and prompts: what PPO trains with."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from rl2.batch import Batch
from rl2.config.conditions import (
    choose_exactness,
    has_full_kl,
    has_teacher,
    loads_teacher,
    needs_critic,
    needs_reference,
    old_policy_is_sampler,
    sends_adapters,
)
from rl2.config.schema import (
    PPOConfig,
    RolloutWorkerConfig,
    model_name,
    teacher_model,
    worker_names,
)
from rl2.env.load import Functions
from rl2.inputs import count_steps
from rl2.parallel.rank import is_first_rank
from rl2.ppo_setup import Teacher, set_up, start_engine
from rl2.recorder import Recorder
from rl2.report.loggers import MetricsLog
from rl2.rollout.overlap import SamplerProcesses, Serving, serve
from rl2.rollout.sampling import Sampling
from rl2.rollout.saved import SavedRollouts, StartModel, hash_tokens, pack_tokens
from rl2.rollout.stats import add_token_columns, to_records
from rl2.rollout.trajectory import Trajectory
from rl2.run.signals import StopSignal, freeze_loaded
from rl2.worker import SharedReference, Worker


@dataclass
class Models:
    """The models of a run that lie in the processes that train."""

    actor: Worker
    critic: Worker | None
    reference: Worker | SharedReference | None
    teacher: Worker | None

    @property
    def trained(self) -> dict[str, Worker]:
        """The workers that are updated, by the name of their section."""
        trained = {"actor": self.actor}
        return trained if self.critic is None else trained | {"critic": self.critic}


class StepResult(NamedTuple):
    """What a step of PPO leaves."""

    trajectories: list[Trajectory]
    batch: Batch  # made of them, with advantages
    metrics: dict[str, float]


class PPORun:
    """What PPO's `train` works with."""

    def __init__(self, config: PPOConfig, functions: Functions | None = None):
        """`functions` are the environment, in the place of rollout.env_path."""
        setup = set_up(config, functions)
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
        # The teacher that runs in the updates, and what scores the sampled tokens before them.
        self.full_kl_teacher = models.teacher if has_full else None
        self.scoring_teacher: Teacher | None = None
        if has_teacher(config) and not has_full:
            self.scoring_teacher = setup.teacher_server or models.teacher
        self.sends_adapters = sends_adapters(config)
        self.sampling: Sampling
        if saved is not None:
            self.sampling = saved
        elif setup.link is not None:
            self.sampling = SamplerProcesses(
                setup.link,
                num_steps,
                max_staleness=config.rollout.max_staleness or 1,
                old_policy_is_sampler=old_policy_is_sampler(config),
            )
        else:
            self.sampling = start_engine(setup, num_steps)
        objects: dict[str, Stateful] = {"data": self.sampling}
        if config.kl.update_freq:
            objects["reference"] = self.moving_reference()
        self.recorder = Recorder(
            self.folder,
            setup.tokenizer,
            models.trained,
            objects,
            num_steps=num_steps,
            device=setup.device,
            evaluate=self.evaluate if setup.tests and saved is None else None,
        )

    def _open_saved_rollouts(self) -> SavedRollouts | None:
        actor, path = self.config.actor, self.config.trainer.rollouts_from
        if not path:
            return None
        start_model = StartModel(actor.model_name, actor.quantize_base)
        return SavedRollouts(path, start_model, self.tokens_hash, actor.routing_replay)

    def begin(self) -> None:
        """Brings engine and actor to the same weights, and evaluates before the first step."""
        self.sampling.begin()
        actor = self.config.actor
        if self.sends_adapters:  # which only the actor has drawn
            self._send_weights()
            self._verify_weights()
        elif self.recorder.start_step > 0 or actor.quantize_base:
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
        if isinstance(self.sampling, SamplerProcesses):
            with self.recorder.phase("wait"):
                self.sampling.wait()

    def sync(self, step: int) -> None:
        """Wakes the engine with the actor's weights of `step`.

        They are compared with the engine's in the first step of this launch, and in every step with
        rollout.check_weights.
        """
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

    def finish_step(self, step: int, result: StepResult) -> bool:
        """Evaluates, logs and saves where that is due. Returns whether to stop here."""
        if self.tokens:
            add_token_columns(self.tokens, result.batch)
        records = to_records(result.trajectories, result.batch)
        return self.recorder.finish_step(step, result.metrics, records, self.tokens)

    def evaluate(self, step: int) -> dict[str, float]:
        """Plays the test sets and writes their transcripts. Returns their metrics."""
        return self.sampling.evaluate(step, self.actor.version)

    def finish(self) -> None:
        """Ends the engine and the environment, and saves the final model."""
        self.sampling.close()
        self.recorder.finish(self.actor)


class SamplerRun:
    """What a process of rollout.num_processes does while the others train: it samples for them."""

    def __init__(self, config: PPOConfig, functions: Functions | None = None):
        """`functions` are the environment, in the place of rollout.env_path."""
        setup = set_up(config, functions)
        assert setup.prompts is not None and setup.link is not None
        self.sampling = start_engine(setup, count_steps(setup.prompts, setup.folder))
        collector, evaluator = self.sampling.collector, self.sampling.evaluator
        self.serving = Serving(setup.link, collector, evaluator)

    def run(self) -> None:
        """Serves the trainers until they close, and ends the engine and the environment.

        A first signal ends no sampler: the trainers, which get it too, need the rollouts ahead.
        """
        StopSignal().listen()
        freeze_loaded()
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
        section = replace(config.critic, model_name=model_name(config, "critic"))
        num_critic_updates = count_updates("critic", section)
        critic = new_worker(section, device, critic=True, num_updates=num_critic_updates)
    return Models(actor, critic, reference, teacher)
