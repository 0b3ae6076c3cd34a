"""PPO and GRPO: `torchrun --nproc_per_node=N -m rl2.trainer.ppo key=value`. `train` is the algorithm; read it first."""

import sys

import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from rl2.algorithms import advantages, losses
from rl2.batch import Batch, collate, split_minibatches
from rl2.config.parse import parse, user_errors
from rl2.config.rules import validate_ppo
from rl2.config.schema import PPOConfig
from rl2.data import chat
from rl2.data.examples import Prompts
from rl2.data.rows import check_ppo_row, load_rows
from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.select import make_engine
from rl2.env.contract import EnvFailures
from rl2.env.load import load_env, preflight
from rl2.model.token_model import TokenScores
from rl2.parallel.mesh import init_distributed
from rl2.rollout.collect import Rollout
from rl2.rollout.stats import gather_samples, summarise
from rl2.trainer.build import count_steps, start_loading
from rl2.trainer.recorder import Recorder
from rl2.worker import Worker, compute_dtype


def train(run) -> None:
    """The whole algorithm. Every process holds the same `batch` and runs the same lines; forward, backward and generate
    are what the workers and engines split."""
    config, metrics, actor, critic = run.config, run.metrics, run.actor, run.critic
    for step in range(run.step + 1, run.num_steps + 1):
        with metrics.phase("rollout"):
            assert run.engine.version == actor.version, (
                "the engine has other weights than the actor"
            )
            prompts, num = run.next_prompts(step), config.data.responses_per_prompt
            trajectories = run.rollout(prompts, run.train_params, num, "train", step, run.wanted)
            batch = collate(gather_samples(trajectories))
            run.engine.sleep()
        logged = summarise(trajectories, run.failures, actor.version)
        with metrics.phase("infer"):
            if run.reference is not None:
                batch.ref_logps = run.reference(batch, run.temperature).logps
            if config.actor.update_per_rollout > 1 or config.kl.type == "reward":
                batch.old_logps = actor.infer(batch, run.temperature).logps
            if critic is not None:
                batch.values = critic.infer(batch).values
        logged |= add_advantages(batch, config)
        with metrics.phase("update"):
            if critic is not None:
                logged |= run.update(
                    critic, "critic", batch, config.critic, value_loss(config.critic), step
                )
            logged |= run.update(actor, "actor", batch, config.actor, policy_loss(config), step)
        with metrics.phase("sync"):
            run.engine.wake()
            run.engine.load_weights(actor.iter_full_weights(run.engine_dtype), actor.version)
            if config.rollout.check_weights:
                run.engine.verify_weights(actor.iter_full_weights(run.engine_dtype), actor.version)
        stopping = bool(run.books.stop)
        logged |= run.evaluate(step, last=stopping or step == run.num_steps)
        run.finish_step(step, trajectories, batch, logged, stopping)
        if stopping:
            break


def add_advantages(batch: Batch, config) -> dict[str, float]:
    """Fills batch.advantages (and returns); the estimators are in algorithms.py."""
    rewards, kl, adv = batch.rewards, config.kl, config.adv
    logged = {
        "rollout/zero_variance": advantages.zero_std_group_fraction(
            rewards, batch.mask, batch.group, batch.trajectory
        ).item()
    }
    if kl.type == "reward":
        penalty = (
            losses.kl_estimate(batch.old_logps, batch.ref_logps, kl.reward_estimator) * batch.mask
        )
        rewards = rewards - kl.coef * penalty
        logged["actor/kl"] = (penalty.sum() / batch.mask.sum().clamp(min=1)).item()
    if adv.estimator == "gae":
        batch.advantages, batch.returns = advantages.gae(
            rewards, batch.values, batch.mask, batch.trajectory, adv.gamma, adv.lamda
        )
        if adv.norm_var:
            batch.advantages = advantages.whiten(batch.advantages, batch.mask)
    else:
        batch.advantages = advantages.group_advantages(
            rewards, batch.mask, batch.group, batch.trajectory, adv.norm_var
        )
    return logged


def policy_loss(config):
    """The actor's loss on whole sequences [b, T]: clipped policy gradient, KL and entropy terms, mismatch metrics."""
    actor, kl = config.actor, config.kl

    def loss_fn(batch: Batch, scores: TokenScores):
        # One update a rollout starts from the policy that sampled: its log-probabilities are the current ones.
        old_logps = scores.logps.detach() if batch.old_logps is None else batch.old_logps
        correction = None
        if actor.correction != "none":
            correction = losses.importance_weights(
                old_logps, batch.engine_logps, batch.mask, actor.correction, actor.correction_cap
            )
        loss, metrics = losses.policy_loss(
            scores.logps,
            old_logps,
            batch.advantages,
            batch.mask,
            batch.token_weights,
            actor.clip,
            actor.clip_high,
            actor.dual_clip,
            actor.loss,
            correction,
        )
        mismatch = losses.rollout_mismatch(old_logps, batch.engine_logps, batch.token_weights)
        metrics |= {f"mismatch_{name}": value for name, value in mismatch.items()}
        if kl.type == "loss":
            estimate = losses.kl_estimate(scores.logps, batch.ref_logps, kl.loss_estimator)
            metrics["kl"] = (estimate * batch.token_weights).sum()
            loss = loss + kl.coef * metrics["kl"]
            metrics["kl"] = metrics["kl"].detach()
        if scores.entropy is not None:
            metrics["entropy"] = (scores.entropy * batch.token_weights).sum()
            loss = loss - actor.entropy * metrics["entropy"]
            metrics["entropy"] = metrics["entropy"].detach()
        return loss, metrics

    return loss_fn


def value_loss(critic):
    """The critic's clipped squared error on whole sequences."""

    def loss_fn(batch: Batch, scores: TokenScores):
        return losses.value_loss(
            scores.values, batch.values, batch.returns, batch.token_weights, critic.clip
        )

    return loss_fn


def sampling_params(section, stop_token_ids: list[int]) -> SamplingParams:
    """What engines are given of a section of the config. `stop_token_ids`: the model's own, added to the section's."""
    return SamplingParams(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        max_new_tokens=section.max_new_tokens,
        stop_token_ids=tuple(sorted({*section.stop_token_ids, *stop_token_ids})),
    )


class Run:
    """What `train` works with, made from the config: workers, engine, data, and the books that are kept."""

    def __init__(self, config: PPOConfig):
        self.config = config
        rows = load_rows(config.data.path, check=check_ppo_row)
        env = load_env(config.rollout.env_path, config.rollout.env_timeout)
        for warning in preflight(env, rows, config.rollout.max_turns):
            print(f"warning: {warning}", flush=True)
        self.device = init_distributed()
        name = config.actor.model_name
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self._prepare_data(rows)
        self._make_workers()
        self._make_rollout(env)
        self.temperature = config.rollout.train_sampling_params.temperature
        self._begin()

    def _prepare_data(self, rows):
        data, first = self.config.data, dist.get_rank() == 0
        size = data.prompts_per_rollout
        self.prompts = Prompts(
            rows,
            self.tokenizer,
            max_length=data.max_length,
            shuffle=data.shuffle,
            seed=data.seed,
            batch_size=size,
            progress=first,
        )
        self.num_steps = count_steps(self.prompts, self.config, "prompts")
        self.test_prompts = []
        if data.test_path:
            rows = load_rows(data.test_path, "test", check_ppo_row)
            self.test_prompts = list(
                Prompts(
                    rows,
                    self.tokenizer,
                    max_length=data.max_length,
                    shuffle=False,
                    seed=0,
                    batch_size=1,
                    progress=first,
                )
            )
        self._check_positions()

    def _check_positions(self):
        """Whether the longest trajectory fits the model, before it is loaded."""
        rollout, name = self.config.rollout, self.config.actor.model_name
        positions = getattr(AutoConfig.from_pretrained(name), "max_position_embeddings", None)
        for kind, prompts in (("train", self.prompts), ("test", self.test_prompts)):
            longest = max((len(prompt.tokens) for prompt in prompts), default=0)
            answer = getattr(rollout, f"{kind}_sampling_params").max_new_tokens
            if positions and prompts and longest + rollout.max_turns * answer > positions:
                raise ValueError(
                    f"{name} has {positions} positions, but a trajectory may get {longest} (the longest {kind} prompt) + "
                    f"{rollout.max_turns} x {answer} tokens: lower rollout.{kind}_sampling_params.max_new_tokens, "
                    "data.max_length or rollout.max_turns"
                )

    def _make_workers(self):
        config, device = self.config, self.device
        start_loading(config.actor.model_name, config.trainer.seed)
        num = self.num_steps - config.actor.freeze_steps
        self.actor = Worker(config.actor, device, num_updates=num * config.actor.update_per_rollout)
        self.reference = self.actor.reference() if config.kl.coef else None
        self.workers, self.critic = {"actor": self.actor}, None
        if config.adv.estimator == "gae":
            config.critic.model_name = config.critic.model_name or config.actor.model_name
            num = self.num_steps - config.critic.freeze_steps
            self.critic = Worker(
                config.critic, device, True, num * config.critic.update_per_rollout
            )
            self.workers["critic"] = self.critic

    def _make_rollout(self, env):
        config, name = self.config, self.config.actor.model_name
        deterministic, partial = config.trainer.deterministic, config.rollout.partial
        self.wanted = config.data.prompts_per_rollout if partial else None
        deterministic = (
            self.device.type == "cpu" and not partial if deterministic is None else deterministic
        )
        self.engine_dtype = compute_dtype(config.actor.dtype, self.device)
        section, seed = config.rollout, config.trainer.seed
        settings = EngineSettings(
            model_name=name,
            dtype=self.engine_dtype,
            device=self.device,
            max_running_requests=section.max_running,
            deterministic=deterministic,
            tp_size=section.tp_size,
            gpu_memory_utilization=section.gpu_memory_utilization,
            engine_args=section.engine_args,
            seed=seed,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )
        self.engine = make_engine(section.engine, settings)
        stops = chat.stop_token_ids(
            self.tokenizer, GenerationConfig.from_pretrained(name).eos_token_id
        )
        self.train_params = sampling_params(section.train_sampling_params, stops)
        self.test_params = sampling_params(section.test_sampling_params, stops)
        self.failures = EnvFailures(config.rollout.max_env_failures)
        limit = min(
            w.config.max_length_per_device * w.config.sp_size for w in self.workers.values()
        )
        self.rollout = Rollout(
            self.engine,
            env,
            self.tokenizer,
            self.failures,
            config.rollout.max_turns,
            limit,
            config.trainer.seed,
            deterministic,
        )

    def _begin(self):
        """Goes on where an earlier run stopped, or starts with the first evaluation."""
        held = {"rollout": self.rollout}
        self.books = Recorder(
            self.config, self.tokenizer, self.workers, self.num_steps, self.device, held
        )
        self.step, self.metrics = self.books.step, self.books.metrics
        # Both have read the same files, so at the start their weights must agree to the bit.
        sync = self.engine.verify_weights if self.step == 0 else self.engine.load_weights
        sync(self.actor.iter_full_weights(self.engine_dtype), self.actor.version)
        if self.step == 0:
            logged = self.evaluate(0, last=False)
            if logged:
                self.metrics.log(0, logged)

    def next_prompts(self, step: int) -> list:
        """Those of the step; of the next one too where partial rollouts start early. Paused ones have been given out."""
        if not self.wanted:
            return self.prompts.batch(step - 1)
        started = step - 1 + len(self.rollout.paused) // self.wanted
        last = min(step + 1, self.num_steps)
        return [prompt for i in range(started, last) for prompt in self.prompts.batch(i)]

    def update(
        self, worker, name: str, batch: Batch, section, loss_fn, step: int
    ) -> dict[str, float]:
        """`update_per_rollout` optimizer steps of one worker; their mean metrics, by `name`/metric."""
        if step <= section.freeze_steps:
            return {}
        average = getattr(section, "average", "token")
        constant = getattr(section, "average_constant", None)
        entropy = name == "actor" and (section.log_entropy or section.entropy != 0)
        results = []
        for mini in split_minibatches(batch, section.update_per_rollout, seed=step):
            mini.token_weights = losses.token_weights(mini.mask, mini.trajectory, average, constant)
            if name == "actor" and not entropy and self.config.kl.type != "loss":
                # Rows without advantage (every answer of their group earned the same) move nothing and are not run; the
                # loss stays the mean over all. Metrics are means over what was run.
                moving = (mini.advantages != 0).any(1, keepdim=True)
                mini.mask, mini.token_weights = mini.mask * moving, mini.token_weights * moving
            share = mini.token_weights.sum().item() or float("nan")
            result = worker.update(mini, loss_fn, self.temperature, entropy)
            result.metrics = {key: value / share for key, value in result.metrics.items()}
            results.append(result.to_log())
        return {
            f"{name}/{key}": sum(told[key] for told in results) / len(results) for key in results[0]
        }

    def evaluate(self, step: int, last: bool) -> dict[str, float]:
        """Plays the test prompts when that is due."""
        if not self.test_prompts or not self.books.tests_at(step, last):
            return {}
        with self.metrics.phase("test"):
            trajectories = self.rollout(self.test_prompts, self.test_params, 1, "test", step)
            logged = {
                f"test/{key}": value
                for key, value in summarise(trajectories, self.failures, self.actor.version).items()
            }
        self.metrics.write_trajectories(
            "test", step, [trajectory.record() for trajectory in trajectories]
        )
        return logged

    def finish_step(self, step, trajectories, batch, logged, stopping):
        """Trajectories to disk, then the books."""
        advantages = (batch.advantages * batch.mask).sum(1) / batch.mask.sum(1).clamp(min=1)
        of = dict(zip(batch.trajectory.tolist(), advantages.tolist(), strict=True))
        records = [
            {**trajectory.record(), "advantage": of[trajectory.id]} for trajectory in trajectories
        ]
        self.metrics.write_trajectories("train", step, records)
        self.books.finish_step(step, logged, stopping)

    def finish(self) -> None:
        """The final model, and a clean end."""
        self.engine.close()
        self.books.finish(self.actor)


def main() -> None:
    config = parse(PPOConfig, sys.argv[1:], validate_ppo, "rl2.trainer.ppo")
    with user_errors():
        run = Run(config)
        train(run)
        run.finish()


if __name__ == "__main__":
    main()
