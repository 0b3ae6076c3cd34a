"""What `rollout.exact` costs and changes: rollouts and updates with and without it, in turns.

    python benchmarks/lab/exact.py MODEL [--prompts 8] [--samples 8] [--length 128] [--longest 64]
        [--dtype bfloat16] [--rounds 3]

Prompts are random tokens, answers have `--longest` of them. It prints the seconds of each round,
of the clock and of the processor, and the differences of log-probabilities before the update. On a
machine with other work, the seconds of the processor with one thread say more.
"""

import argparse
import asyncio
import statistics
import time

import torch
from transformers import AutoConfig

from rl2.batch import Sample, collate
from rl2.config.schema import WorkerConfig
from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.local import LocalEngine
from rl2.model.exact import Exactness
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    device = init_distributed()
    seconds = {}
    for exact in (False, True) * arguments.rounds:
        seconds.setdefault(exact, []).append(run(arguments, device, exact))
    usual, exact = (
        [statistics.median(column) for column in zip(*seconds[kind], strict=True)]
        for kind in (False, True)
    )
    ratios = [f"{b / a:.2f}" for a, b in zip(usual, exact, strict=True)]
    print(
        "exact / usual, medians: step {} of the clock, {} of the processor; rollout {}, update {} "
        "of the processor".format(*ratios)
    )


def run(arguments, device, exact: bool) -> tuple[float, ...]:
    """One round. Returns seconds: of clock and processor, and of the processor by phase."""
    dtype = getattr(torch, arguments.dtype)
    slots = arguments.prompts * arguments.samples
    settings = EngineSettings(
        arguments.model, dtype, device, max_running_requests=slots, exact=exact
    )
    engine = LocalEngine(settings)
    config = WorkerConfig(
        model_name=arguments.model,
        dtype=arguments.dtype,
        gradient_checkpointing=False,
        max_length_per_device=4096,
    )
    exactness = Exactness.DEMANDED if exact else Exactness.OFF
    worker = Worker(config, device, num_updates=2, exactness=exactness)
    vocabulary = AutoConfig.from_pretrained(arguments.model).vocab_size

    def measure(work):
        clock, processor = time.perf_counter(), time.process_time()
        result = work()
        return result, time.perf_counter() - clock, time.process_time() - processor

    roll_out(engine, arguments, vocabulary, longest=2)  # a warm-up
    batch, clock, processor = measure(
        lambda: roll_out(engine, arguments, vocabulary, arguments.longest)
    )
    logps = worker.infer(batch).logps
    engine.close()
    _, update_clock, update_processor = measure(lambda: worker.update(batch, loss))
    difference = ((logps - batch.engine_logps) * batch.mask).abs()
    total = int(batch.mask.sum())
    print(
        f"exact={exact}: {total} tokens, difference mean {difference.sum() / total:.3g}, largest "
        f"{difference.max():.3g}, equal {int(((difference == 0) & (batch.mask > 0)).sum())}; "
        f"rollout {clock:.1f} s ({processor:.1f} of the processor), update {update_clock:.1f} s "
        f"({update_processor:.1f})",
        flush=True,
    )
    return clock + update_clock, processor + update_processor, processor, update_processor


def loss(batch, scores):
    return -(scores.logps * batch.token_weights).sum(), {}


def roll_out(engine, arguments, vocabulary: int, longest: int):
    generator = torch.Generator().manual_seed(0)
    size = (arguments.prompts, arguments.length)
    prompts = torch.randint(10, vocabulary, size, generator=generator).tolist()
    params = SamplingParams(max_new_tokens=longest)

    async def play():
        calls = [
            engine.generate(prompt, params, (group, i))
            for group, prompt in enumerate(prompts)
            for i in range(arguments.samples)
        ]
        return await asyncio.gather(*calls)

    samples = []
    for i, answer in enumerate(engine.loop.run_until_complete(play())):
        prompt = prompts[i // arguments.samples]
        zeros = [0] * len(prompt)
        mask = zeros + [1] * len(answer.tokens)
        logps = zeros + answer.logps
        group = i // arguments.samples
        samples.append(Sample(prompt + answer.tokens, mask, logps, [0] * len(mask), group, i))
    batch = collate(samples)
    batch.token_weights = batch.mask / batch.mask.sum()
    return batch


if __name__ == "__main__":
    main()
