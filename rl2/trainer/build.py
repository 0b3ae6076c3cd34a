"""From the config to workers, engine and data: what every main begins with."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from rl2.batch import Batch, scored_spans
from rl2.config.schema import PPOConfig, needs_critic
from rl2.data import chat
from rl2.data.examples import EpochSampler, Example, Examples, Prompt, Prompts, RenderedReply
from rl2.data.rows import check_ppo_row, load_rows
from rl2.engine.base import Engine, EngineSettings, SamplingParams
from rl2.engine.select import make_engine
from rl2.env.call import Env
from rl2.env.contract import EnvFailures
from rl2.env.load import load_env, preflight
from rl2.parallel.mesh import init_distributed
from rl2.rollout.collect import Collector
from rl2.rollout.stats import count_failed, summarise, to_records
from rl2.rollout.trajectory import Player, Trajectory
from rl2.trainer.recorder import Evaluate, Recorder
from rl2.worker import Loss, UpdateResult, Worker, compute_dtype

Tokenizer = PreTrainedTokenizerBase


class PPORun:
    """What PPO's `train` works with.

    Data and environment are checked first, then the models are loaded.
    """

    def __init__(self, config: PPOConfig):
        self.config = config
        rows = load_rows(config.data.path, check=check_ppo_row)
        env = load_env(config.rollout.env_path, config.rollout.env_timeout)
        for warning in preflight(env, rows, config.rollout.max_turns):
            print(f"warning: {warning}", flush=True)
        device = init_distributed()
        tokenizer = AutoTokenizer.from_pretrained(config.actor.model_name)
        prompts = _make_prompts(rows, tokenizer, config)
        self.num_steps = _count_steps(prompts, config, "prompts")
        self.test_prompts: list[Prompt] = []
        if config.data.test_path:
            test_rows = load_rows(config.data.test_path, "test", check_ppo_row)
            self.test_prompts = list(_make_prompts(test_rows, tokenizer, config, is_test=True))
        _check_trajectory_length(config, "train", list(prompts))
        _check_trajectory_length(config, "test", self.test_prompts)

        self._make_workers(device)
        self._make_collector(device, env, tokenizer, prompts)
        workers = {"actor": self.actor}
        if self.critic is not None:
            workers["critic"] = self.critic
        parts = {**workers, "rollout": self.collector}
        self.recorder = Recorder(config, tokenizer, workers, parts, self.num_steps, device)
        self.start_step = self.recorder.resume()

    def _make_workers(self, device: torch.device) -> None:
        config = self.config
        _start_loading(config.actor.model_name, config.trainer.seed)
        actor_steps = self.num_steps - config.actor.freeze_steps
        num_updates = actor_steps * config.actor.update_per_rollout
        self.actor = Worker(config.actor, device, num_updates=num_updates)
        # The scores of the reference model; None without a KL term.
        self.reference = self.actor.reference() if config.kl.coef else None
        self.critic: Worker | None = None
        if needs_critic(config.adv.estimator):
            model_name = config.critic.model_name or config.actor.model_name
            critic_config = replace(config.critic, model_name=model_name)
            critic_steps = self.num_steps - config.critic.freeze_steps
            num_updates = critic_steps * config.critic.update_per_rollout
            self.critic = Worker(critic_config, device, critic=True, num_updates=num_updates)

    def _make_collector(
        self, device: torch.device, env: Env, tokenizer: Tokenizer, prompts: Prompts
    ) -> None:
        config = self.config
        deterministic = config.trainer.deterministic
        if deterministic is None:
            deterministic = device.type == "cpu" and not config.rollout.partial
        self.engine_dtype = compute_dtype(config.actor.dtype, device)
        self.engine = _make_engine(config, device, self.engine_dtype, deterministic)
        eos = GenerationConfig.from_pretrained(config.actor.model_name).eos_token_id
        stop_ids = chat.stop_token_ids(tokenizer, eos)
        self.test_params = _sampling_params(config.rollout.test_sampling_params, stop_ids)
        trained = [self.actor] if self.critic is None else [self.actor, self.critic]
        player = Player(
            engine=self.engine,
            env=env,
            tokenizer=tokenizer,
            failures=EnvFailures(config.rollout.max_env_failures),
            max_turns=config.rollout.max_turns,
            max_length=min(w.config.max_length_per_device * w.config.sp_size for w in trained),
        )
        self.collector = Collector(
            player,
            prompts=prompts,
            params=_sampling_params(config.rollout.train_sampling_params, stop_ids),
            prompts_per_step=config.data.prompts_per_rollout,
            samples_per_prompt=config.data.responses_per_prompt,
            num_steps=self.num_steps,
            seed=config.trainer.seed,
            deterministic=deterministic,
            partial=config.rollout.partial,
        )

    @property
    def temperature(self) -> float:
        """Divides the logits in training as it did in sampling."""
        return self.config.rollout.train_sampling_params.temperature

    def begin(self) -> None:
        """Brings engine and actor to the same weights, and evaluates before the first step."""
        weights = self.actor.iter_full_weights(self.engine_dtype)
        if self.start_step > 0:
            self.engine.load_weights(weights, self.actor.version)
        else:  # both have read the same files, so their weights must agree to the bit
            self.engine.verify_weights(weights, self.actor.version)
        self.recorder.begin(self.start_step, self.evaluate if self.test_prompts else None)

    def check_env(self, trajectories: list[Trajectory]) -> None:
        """RuntimeError if the environment failed on too many of a step's trajectories."""
        num_failed = count_failed(trajectories)
        self.collector.player.failures.check(num_failed, len(trajectories))

    def evaluate(self, step: int) -> dict[str, float]:
        """Plays the test prompts and writes their transcripts. Returns their metrics."""
        trajectories = self.collector.play(self.test_prompts, self.test_params, 1, "test", step)
        self.check_env(trajectories)
        self.recorder.write_records("test", step, to_records(trajectories))
        return summarise(trajectories, self.actor.version)

    def finish(self) -> None:
        """Ends the engine and saves the final model."""
        self.engine.close()
        self.recorder.finish(self.actor)


def _make_prompts(
    rows: list[dict], tokenizer: Tokenizer, config: PPOConfig, is_test: bool = False
) -> Prompts:
    """The prompts in the order of training; those of a test in the order of the rows."""
    data = config.data
    return Prompts(
        rows,
        tokenizer,
        max_length=data.max_length,
        shuffle=data.shuffle and not is_test,
        seed=0 if is_test else data.seed,
        batch_size=1 if is_test else data.prompts_per_rollout,
        progress=dist.get_rank() == 0,
    )


def _check_trajectory_length(config: PPOConfig, split: str, prompts: list[Prompt]) -> None:
    """ValueError if the longest trajectory of the split has more positions than the model."""
    positions = _max_positions(config.actor.model_name)
    max_turns = config.rollout.max_turns
    answer = getattr(config.rollout, f"{split}_sampling_params").max_new_tokens
    longest = max((len(prompt.tokens) for prompt in prompts), default=0)
    if positions and prompts and longest + max_turns * answer > positions:
        raise ValueError(
            f"{config.actor.model_name} has {positions} positions, but a trajectory may get "
            f"{longest} (the longest {split} prompt) + {max_turns} x {answer} tokens: lower "
            f"rollout.{split}_sampling_params.max_new_tokens, data.max_length or rollout.max_turns"
        )


def _make_engine(
    config: PPOConfig, device: torch.device, dtype: torch.dtype, deterministic: bool
) -> Engine:
    rollout = config.rollout
    settings = EngineSettings(
        model_name=config.actor.model_name,
        dtype=dtype,
        device=device,
        max_running_requests=rollout.max_running,
        deterministic=deterministic,
        tp_size=rollout.tp_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        engine_args=rollout.engine_args,
        seed=config.trainer.seed,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    return make_engine(rollout.engine, settings)


def _sampling_params(config: Any, stop_token_ids: list[int]) -> SamplingParams:
    """A section of the config as the engine takes it, with the model's own stop tokens."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=tuple(sorted({*config.stop_token_ids, *stop_token_ids})),
    )


def _count_steps(items: EpochSampler, config: Any, item_name: str) -> int:
    """The steps of a run over `items`. Prints how many of them were dropped."""
    if items.num_dropped and dist.get_rank() == 0:
        limit = f"data.max_length={config.data.max_length}"
        print(f"{items.num_dropped} {item_name} are longer than {limit} and dropped", flush=True)
    steps = items.num_steps(config.trainer.n_epochs)
    return min(steps, config.trainer.max_steps or steps)


def _max_positions(model_name: str) -> int | None:
    return getattr(AutoConfig.from_pretrained(model_name), "max_position_embeddings", None)


def _start_loading(model_name: str, seed: int) -> None:
    """Prints that the model is being loaded. `seed` is that of new weights."""
    torch.manual_seed(seed)
    if dist.get_rank() == 0:
        print(f"loading {model_name} ...", flush=True)
    else:
        disable_progress_bar()


class OfflineRun:
    """What `train` of SFT, DPO and the reward model works with: examples, a worker, a recorder.

    `worker_name` is the config's section of the worker: actor or critic. `render(tokenizer, row)`
    gives the replies of a row, see `Examples`. `make_batch(run, examples)` gives columns with their
    token weights.
    """

    def __init__(
        self,
        config: Any,
        worker_name: str,
        render: Callable[[Tokenizer, dict], list[RenderedReply]],
        make_batch: Callable[["OfflineRun", list[Example]], Batch],
    ):
        self.config = config
        self.worker_name = worker_name
        self.make_batch = make_batch
        worker_config = getattr(config, worker_name)
        device = init_distributed()
        self.tokenizer = AutoTokenizer.from_pretrained(worker_config.model_name)
        self.examples = self._load_examples(render)
        self.num_steps = _count_steps(self.examples, config, "training rows")
        self.test_batch: Batch | None = None
        longest = self.examples.longest
        if config.data.test_path:
            test_examples = self._load_examples(render, is_test=True)
            _count_steps(test_examples, config, "test rows")
            self.test_batch = make_batch(self, list(test_examples))
            longest = max(longest, test_examples.longest)
        self._check_row_length(longest)
        _start_loading(worker_config.model_name, config.trainer.seed)
        is_critic = worker_name == "critic"
        self.worker = Worker(worker_config, device, is_critic, num_updates=self.num_steps)
        workers = {worker_name: self.worker}
        self.recorder = Recorder(
            config, self.tokenizer, workers, dict(workers), self.num_steps, device
        )
        self.start_step = self.recorder.resume()

    def _load_examples(self, render: Callable, is_test: bool = False) -> Examples:
        data = self.config.data
        return Examples(
            data.test_path if is_test else data.path,
            "test" if is_test else "train",
            self.tokenizer,
            render,
            max_length=data.max_length,
            shuffle=data.shuffle and not is_test,
            seed=0 if is_test else data.seed,
            batch_size=1 if is_test else data.batch_size,
            progress=dist.get_rank() == 0,
        )

    def _check_row_length(self, longest: int) -> None:
        model_name = getattr(self.config, self.worker_name).model_name
        positions = _max_positions(model_name)
        if positions and longest > positions:
            raise ValueError(
                f"{model_name} has {positions} positions, but a row has {longest} tokens: "
                "lower data.max_length"
            )

    def begin(self, evaluate: Evaluate) -> None:
        """Evaluates before the first step; `evaluate(step)` is called where that is due."""
        has_test = self.test_batch is not None
        self.recorder.begin(self.start_step, evaluate if has_test else None)

    def batch(self, step: int) -> Batch:
        """The batch of step 1, 2, ..."""
        with self.recorder.phase("data"):
            return self.make_batch(self, self.examples.batch(step - 1))

    def finish_step(self, step: int, batch: Batch, result: UpdateResult) -> bool:
        """Evaluates, logs and saves where that is due. Returns whether to stop here."""
        metrics = {f"{self.worker_name}/{name}": x for name, x in result.to_log().items()}
        metrics["tokens/trained"] = int(batch.mask.sum())
        metrics["tokens/total"] = sum(end for _, end in scored_spans(batch))
        return self.recorder.finish_step(step, metrics)

    def measure(self, loss_fn: Loss) -> dict[str, float]:
        """The loss on the test rows, and its metrics."""
        assert self.test_batch is not None
        loss, metrics = loss_fn(self.test_batch, self.worker.infer(self.test_batch))
        return {name: value.item() for name, value in {"loss": loss, **metrics}.items()}

    def finish(self) -> None:
        """Saves the final model."""
        self.recorder.finish(self.worker)
