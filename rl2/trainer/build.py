"""From the config to workers, engine and data: what every main begins with."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rl2.batch import Batch, scored_spans
from rl2.checkpoints import Parts
from rl2.config.conditions import needs_critic
from rl2.config.parse import parse
from rl2.config.schema import PPOConfig, RolloutWorkerConfig, SamplingConfig, worker_names
from rl2.data.chat import ChatTemplate
from rl2.data.examples import Example, Examples, RowKind
from rl2.engine.base import Engine, EngineSettings, SamplingParams
from rl2.engine.select import default_max_running, make_engine
from rl2.env.contract import EnvFailures
from rl2.evaluate import Evaluator, evaluate_only, with_names
from rl2.inputs import (
    find_input_problems,
    make_chat_template,
    make_prompts,
    print_once,
    read_examples,
    read_ppo_inputs,
)
from rl2.memory_plan import Prediction, choose_checkpointing
from rl2.model.folder import (
    check_model,
    check_num_layers,
    check_token_ids,
    check_tokens,
    load_eos_token_ids,
    load_tokenizer,
    max_positions,
)
from rl2.model.head import Diverged
from rl2.parallel.device import compute_dtype
from rl2.parallel.mesh import init_distributed
from rl2.rollout.collect import Collector, RolloutRules
from rl2.rollout.endpoint import make_player
from rl2.rollout.saved import SavedRollouts, checksum, pack_tokens
from rl2.rollout.trajectory import Trajectory
from rl2.run_folder import RunFolder
from rl2.signals import guard
from rl2.trainer.recorder import Recorder
from rl2.worker import Loss, UpdateResult, Worker


def run_trainer(kind: type, make_run: Callable[[Any], Any], train: Callable[[Any], None]) -> None:
    """The main of a trainer whose config is a `kind`: makes its run, trains it and ends it."""
    config: Any = parse(kind, sys.argv[1:], find_input_problems)
    with guard(config.trainer.watchdog):
        run = make_run(config)
        if config.trainer.eval_only:
            evaluate_only(run.evaluator, run.folder)
        else:
            try:
                train(run)
            except Diverged as error:
                raise Diverged(run.recorder.explain_divergence(str(error))) from error
            run.finish()


class PPORun:
    """What PPO's `train` works with.

    Data and environment are checked first, then the models are loaded.
    """

    def __init__(self, config: PPOConfig):
        self.config = config
        self.folder = RunFolder(config)
        rows, self.env = read_ppo_inputs(config)
        device = init_distributed()
        self.folder.agree()
        tokenizer = load_tokenizer("actor.model_name", config.actor.model_name)
        template = make_chat_template(config.data, tokenizer, self.folder.start.date)
        self.meaning = checksum(tokenizer, config.rollout.train_sampling_params.temperature)
        self.tokens: dict[str, Any] = {}  # of the last rollout, if they are kept
        if needs_critic(config.adv.estimator) and config.critic.model_name:
            check_model("critic.model_name", config.critic.model_name, critic=True)
        if config.teacher.model_name:
            check_tokens("teacher.model_name", config.teacher.model_name, tokenizer)
        prompts, tests = make_prompts(config, rows, template)
        _check_numbers(config)
        config = choose_checkpointing(config)
        self.prediction = Prediction(config, dist.get_world_size())
        self.workers: dict[str, Worker] = {}  # none in an evaluation
        self.frozen: dict[str, Worker] = {}
        saved, num_steps = None, 0
        if prompts is not None:
            saved, num_steps = self._plan_steps(prompts)
            num_updates = {
                name: self.folder.count_updates(name, num_steps) for name in worker_names(config)
            }
            self.workers, self.frozen = make_ppo_workers(config, device, num_updates)
            self.actor = self.workers["actor"]
        self.critic = self.workers.get("critic")
        self.deterministic = config.trainer.deterministic
        if self.deterministic is None:
            self.deterministic = device.type == "cpu" and not config.rollout.partial
        self.evaluator: Evaluator | None = None
        self.engine = None if saved else self._make_engine(device)
        self.collector = saved or self._make_collector(template, prompts, tests, num_steps)
        if prompts is None:
            return
        parts: Parts = {"data": self.collector}
        if config.kl.update_freq:
            parts["reference"] = self.frozen["ref_logps"]
        self.recorder = Recorder(
            self.folder, tokenizer, self.workers, parts, num_steps, device, self.prediction
        )
        self.recorder.resume()

    def _plan_steps(self, prompts: Examples) -> tuple[SavedRollouts | None, int]:
        """(the rollouts of another run, None where they are sampled; the number of steps)."""
        config = self.config
        if path := config.trainer.rollouts_from:
            saved = SavedRollouts(path, config.actor.model_name, self.meaning)
            return saved, self.folder.count_steps(saved.num_steps, batch_size=1)
        return None, _count_steps(prompts, self.folder)

    def _make_collector(
        self,
        template: ChatTemplate,
        prompts: Examples | None,
        tests: dict[str, Examples],
        num_steps: int,
    ) -> Collector:
        config = self.config
        assert self.engine is not None
        stop_ids = template.stop_token_ids(load_eos_token_ids(config.actor.model_name))
        limits = [max_positions(config.actor.model_name)]
        for worker in (*self.workers.values(), *self.frozen.values()):
            limits.append(worker.config.max_length_per_device * worker.config.sp_size)
            limits.append(max_positions(worker.config.model_name))
        player = make_player(
            engine=self.engine,
            env=self.env,
            template=template,
            failures=EnvFailures(config.rollout.max_env_failures),
            max_turns=config.rollout.max_turns,
            max_length=min(limits),
            reward_weights=config.rollout.reward_weights,
        )
        collector = Collector(
            player,
            prompts=prompts,
            params=_sampling_params(config.rollout.train_sampling_params, stop_ids),
            samples_per_prompt=config.data.responses_per_prompt,
            num_steps=num_steps,
            seed=config.trainer.seed,
            deterministic=self.deterministic,
            rules=RolloutRules.of(config.rollout),
            write_records=self.folder.write_records,
        )
        if tests:
            params = _sampling_params(config.rollout.test_sampling_params, stop_ids)
            num_samples = config.data.responses_per_test_prompt
            self.evaluator = Evaluator(collector, tests, params, num_samples)
        return collector

    def _make_engine(self, device: torch.device) -> Engine:
        actor, rollout = self.config.actor, self.config.rollout
        settings = EngineSettings(
            model_name=actor.model_name,
            dtype=compute_dtype(actor.dtype, device),
            head_dtype=getattr(torch, actor.head_dtype),
            device=device,
            max_running_requests=rollout.max_running or default_max_running(rollout.engine, device),
            deterministic=self.deterministic,
            exact=actor.is_exact,
            tp_size=rollout.tp_size,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            plan_memory=self.prediction.plan,
            engine_args=rollout.engine_args,
            stop=rollout.train_sampling_params.stop + rollout.test_sampling_params.stop,
            seed=self.config.trainer.seed,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )
        return make_engine(rollout.engine, settings)

    def begin(self) -> None:
        """Brings engine and actor to the same weights, and evaluates before the first step."""
        if self.engine:
            # At the start both have read the same files, so their weights must agree to the bit.
            is_start = self.recorder.start_step == 0
            self._send_weights(self.engine.verify_weights if is_start else self.engine.load_weights)
        self.recorder.begin(self.evaluate if self.evaluator else None)

    def collect(self, step: int) -> list[Trajectory]:
        """The trajectories of a step. The engine sleeps afterwards."""
        trajectories = self.collector.collect(step)
        if self.engine:
            assert self.engine.version == self.actor.version, "the engine has other weights"
            self.engine.sleep()
        if self.config.trainer.save_tokens and self.folder.is_first:
            self.tokens = pack_tokens(trajectories, self.meaning)
        return trajectories

    def sync(self) -> None:
        """Wakes the engine with the actor's weights, compared there if the config asks for it."""
        if self.engine:
            self.engine.wake()
            self._send_weights(self.engine.load_weights)
            if self.config.rollout.check_weights:
                self._send_weights(self.engine.verify_weights)

    def _send_weights(self, receive: Callable[..., None]) -> None:
        receive(self.actor.iter_full_weights(self.actor.dtype), self.actor.version)

    def evaluate(self, step: int) -> dict[str, float]:
        """Plays the test sets and writes their transcripts. Returns their metrics."""
        assert self.evaluator is not None
        return self.evaluator.evaluate(step, self.actor.version)

    def finish(self) -> None:
        """Ends the engine and the environment, and saves the final model."""
        if self.engine:
            self.engine.close()
        self.env.close()
        self.recorder.finish(self.actor)


def make_ppo_workers(
    config: PPOConfig, device: torch.device, num_updates: dict[str, int]
) -> tuple[dict[str, Worker], dict[str, Worker]]:
    """The actor and the critic, if any. And the frozen workers, by the column that they fill.

    `num_updates` of each worker are those of the whole run.
    """

    def make_worker(name: str, section: RolloutWorkerConfig) -> Worker:
        # Not 0: a worker that is frozen in all steps of this run may be trained in later ones.
        total = max(num_updates[name], section.updates_per_step)
        return Worker(section, device, name == "critic", total)

    torch.manual_seed(config.trainer.seed)  # of new weights
    workers = {"actor": make_worker("actor", config.actor)}
    frozen = {}
    if config.kl.coef:
        frozen["ref_logps"] = workers["actor"].reference()
    teacher: Any = config.teacher  # without the keys that a frozen worker does not read
    if teacher.model_name:
        frozen["teacher_logps"] = Worker(teacher, device)
    if needs_critic(config.adv.estimator):
        model_name = config.critic.model_name or config.actor.model_name
        section = replace(config.critic, model_name=model_name)
        workers["critic"] = make_worker("critic", section)
    return workers, frozen


def _check_numbers(config: Any) -> None:
    """ValueError for layers and tokens of the config that the models do not have."""
    for worker in worker_names(config):
        section = getattr(config, worker)
        name = section.model_name or config.actor.model_name  # a critic's may be the actor's
        key = f"{worker}.gradient_checkpointing"
        check_num_layers(key, name, section.gradient_checkpointing)
    if isinstance(config, PPOConfig):
        for kind in ("train", "test"):
            params = getattr(config.rollout, f"{kind}_sampling_params")
            key = f"rollout.{kind}_sampling_params.stop_token_ids"
            check_token_ids(key, config.actor.model_name, params.stop_token_ids)


def _sampling_params(config: SamplingConfig, model_stop_ids: list[int]) -> SamplingParams:
    """A section of the config as the engine takes it, with the model's own stop tokens."""
    stop_ids = (*config.stop_token_ids, *model_stop_ids)
    return SamplingParams(**vars(config) | {"stop_token_ids": stop_ids})


def _count_steps(examples: Examples, folder: RunFolder) -> int:
    """The steps of a run over `examples`. Prints how it uses them."""
    steps = folder.count_steps(len(examples), examples.batch_size)
    print_once(examples.describe_steps(steps))
    return steps


class OfflineRun:
    """What `train` of SFT, DPO and the reward model works with: examples, a worker, a recorder.

    `kind` is what the rows are. `make_batch(run, examples)` gives columns with their token weights.
    """

    def __init__(
        self,
        config: Any,
        kind: RowKind,
        make_batch: Callable[["OfflineRun", list[Example]], Batch],
    ):
        self.config = config
        self.make_batch = make_batch
        [self.worker_name] = worker_names(config)
        folder = RunFolder(config)
        device = init_distributed()
        folder.agree()
        is_critic = self.worker_name == "critic"
        key = f"{self.worker_name}.model_name"
        model_name = getattr(config, self.worker_name).model_name
        self.tokenizer = load_tokenizer(key, model_name, is_critic)
        template = make_chat_template(config.data, self.tokenizer, folder.start.date)
        self.examples, tests = read_examples(config, kind, template)
        num_steps = _count_steps(self.examples, folder)
        # By the name of the test set.
        self.test_batches = {name: make_batch(self, list(rows)) for name, rows in tests.items()}
        _check_numbers(config)
        torch.manual_seed(config.trainer.seed)  # of new weights
        config = choose_checkpointing(config)
        prediction = Prediction(config, dist.get_world_size())
        worker_config = getattr(config, self.worker_name)
        self.worker = Worker(worker_config, device, is_critic, num_updates=num_steps)
        workers = {self.worker_name: self.worker}
        parts: Parts = {"data": self.examples}
        self.recorder = Recorder(
            folder, self.tokenizer, workers, parts, num_steps, device, prediction
        )
        self.recorder.resume()

    def begin(self, measure: Callable[[Batch], dict[str, float]]) -> None:
        """Evaluates before the first step. `measure(batch)` gives the metrics of a test set."""
        tests = self.test_batches

        def evaluate(step: int) -> dict[str, float]:
            return with_names({name: measure(tests[name]) for name in tests})

        self.recorder.begin(evaluate if tests else None)

    def next_batch(self) -> Batch:
        """The batch of the next step."""
        with self.recorder.phase("data"):
            return self.make_batch(self, self.examples.next_items())

    def finish_step(self, step: int, batch: Batch, result: UpdateResult) -> bool:
        """Evaluates, logs and saves where that is due. Returns whether to stop here."""
        metrics = {f"{self.worker_name}/{name}": x for name, x in result.to_log().items()}
        metrics["tokens/trained"] = int(batch.mask.sum())
        metrics["tokens/total"] = sum(end for _, end in scored_spans(batch))
        return self.recorder.finish_step(step, metrics)

    def measure(self, loss_fn: Loss, batch: Batch) -> dict[str, float]:
        """The loss on test rows, and its metrics."""
        loss, metrics = loss_fn(batch, self.worker.infer(batch))
        return {name: value.item() for name, value in {"loss": loss, **metrics}.items()}

    def finish(self) -> None:
        """Saves the final model."""
        self.recorder.finish(self.worker)
