"""Rollouts with a slow environment, and partial rollouts: seconds, and how busy the engine is.

    python benchmarks/lab/collector.py MODEL [--slots 32] [--prompts 32] [--samples 4]
        [--longest 128]

- slow env: two turns, and each call of the environment takes so many seconds. The line with 0 s is
  what the engine alone needs.
- whole and partial: six steps of half the prompts, without and with rollout.partial. `length` is
  the mean of the step's answers, `of` that of all answers to the step's prompts.

One process, one engine, trainer.deterministic=false. The lengths of the answers are drawn
beforehand, so that they do not depend on the model: exponential, with a mean of a quarter of
`longest`. A decode step takes `step` seconds at least, as in a larger model. `busy` is the share of
the slots' seconds in which a slot had a request.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from rl2.data.chat import ChatTemplate
from rl2.data.examples import PROMPT_ROWS, DataCursor, Examples
from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.local import LocalEngine
from rl2.env.call import Env
from rl2.env.contract import EnvFailures
from rl2.env.spec import EnvSpec
from rl2.model.folder import load_tokenizer
from rl2.parallel.mesh import init_distributed
from rl2.rollout.collect import NO_RULES, Collector
from rl2.rollout.player import Player

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from common import pack_rows  # noqa: E402

STEPS = 6


def answer_length(longest: int, group: int, number: int, turn: int) -> int:
    """The tokens of a turn of trajectory `number` of a group, the same before and after a pause."""
    rng = random.Random(f"{group} {number} {turn}")
    return min(longest, 1 + int(rng.expovariate(4 / longest)))


class MeasuredEngine(LocalEngine):
    """Ends each answer at its length, and adds up the seconds of busy slots."""

    longest: int
    step_seconds: float
    first_group = 0  # added to the numbers of groups, which begin at 0 in each whole rollout
    num_requests = 0
    busy_seconds = 0.0
    counted_until = 0.0

    async def generate(self, prompt, params, seed):
        num_before = self.longest - params.max_new_tokens  # sampled before a pause
        group, number, turn = seed[-3:]
        whole_length = answer_length(self.longest, self.first_group + group, number, turn)
        params = replace(params, max_new_tokens=whole_length - num_before)
        self.add_requests(1)
        try:
            answer = await super().generate(prompt, params, seed)
        finally:
            self.add_requests(-1)
        is_whole = answer.finish_reason == "length"
        return replace(answer, finish_reason="stop") if is_whole else answer

    def _step(self) -> None:
        end = time.perf_counter() + self.step_seconds
        super()._step()
        time.sleep(max(0.0, end - time.perf_counter()))

    def add_requests(self, change: int) -> None:
        now = time.perf_counter()
        num_busy = min(self.num_requests, self.max_running_requests)
        self.busy_seconds += num_busy * (now - self.counted_until)
        self.counted_until = now
        self.num_requests += change


def make_env(seconds: float) -> Env:
    async def interact(messages):
        await asyncio.sleep(seconds)
        num_turns = sum(message["role"] == "assistant" for message in messages)
        return [{"role": "user", "content": "go on"}] if num_turns < 2 else []

    async def reward_fn(messages):
        await asyncio.sleep(seconds)
        return 1.0

    return Env(EnvSpec({"reward_fn": reward_fn}, interact), timeout=60.0, concurrency=10_000)


def measure(engine, rollout) -> tuple[list, str]:
    """The trajectories of `rollout()`, and a text with its seconds and busy slots."""
    start = time.perf_counter()
    engine.busy_seconds, engine.counted_until = 0.0, start
    trajectories = rollout()
    seconds = time.perf_counter() - start
    busy = engine.busy_seconds / (seconds * engine.max_running_requests)
    return trajectories, f"{seconds:6.2f} s  slots {busy:4.0%} busy"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--step", type=float, default=0.015)
    arguments = parser.parse_args()
    device = init_distributed()
    engine = MeasuredEngine(
        EngineSettings(
            model_name=arguments.model,
            dtype=torch.float32,
            device=device,
            max_running_requests=arguments.slots,
            deterministic=False,
        )
    )
    engine.longest = arguments.longest
    engine.step_seconds = arguments.step
    template = ChatTemplate(load_tokenizer("MODEL", arguments.model))
    params = SamplingParams(max_new_tokens=arguments.longest)

    def make_collector(env_seconds: float, max_turns: int, partial: bool, steps: int = 1):
        player = Player(
            engine=engine,
            env=make_env(env_seconds),
            template=template,
            failures=EnvFailures(0.0),
            max_turns=max_turns,
            max_length=100_000,
        )
        batch_size = arguments.prompts // (2 if steps > 1 else 1)
        rows = [
            {"messages": [{"role": "user", "content": f"question {i}"}]}
            for i in range(batch_size * steps)
        ]
        prompts = Examples(
            pack_rows(rows), template, PROMPT_ROWS, max_length=1000, batch_size=batch_size
        )
        return Collector(
            player,
            cursor=DataCursor(prompts),
            params=params,
            write_records=lambda split, step, records: None,
            samples_per_prompt=arguments.samples,
            num_steps=steps,
            deterministic=False,
            rules=replace(NO_RULES, partial=partial),
        )

    make_collector(0.0, 1, partial=False).collect(1)  # a warm-up
    for env_seconds in (0.0, 0.2, 1.0, 2.0):
        collector = make_collector(env_seconds, 2, partial=False)
        _, text = measure(engine, lambda collector=collector: collector.collect(1))
        print(f"slow env {env_seconds:3.1f} s a call  {text}", flush=True)
    for partial in (False, True):
        name = "partial" if partial else "whole"
        collector = make_collector(0.0, 1, partial, STEPS)
        start = time.perf_counter()
        for step in range(1, STEPS + 1):
            first_group = (step - 1) * arguments.prompts // 2
            engine.first_group = 0 if partial else first_group
            trajectories, text = measure(engine, lambda c=collector, s=step: c.collect(s))
            length = statistics.mean(trajectory.length for trajectory in trajectories)
            expected = statistics.mean(
                answer_length(arguments.longest, group, number, 0)
                for group in range(first_group, first_group + arguments.prompts // 2)
                for number in range(arguments.samples)
            )
            print(f"{name:7} step {step}  length {length:4.1f} of {expected:4.1f}  {text}")
        print(f"{name:7} {STEPS} steps {time.perf_counter() - start:6.2f} s", flush=True)


if __name__ == "__main__":
    main()
