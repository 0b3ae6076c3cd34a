"""How near the machine's rate of matrix products a GRPO step and a supervised step come.

    python benchmarks/limit.py MODEL [--prompts 8] [--samples 8] [--length 94] [--longest 64]
        [--uneven] [--exact true] [--rounds 3]

A GRPO step is a rollout, an update and the transfer of the weights, in this process. A supervised
step is an update on `--prompts` sequences of 512 tokens, all of them trained. Prompts are random
tokens. An answer has `--longest` tokens, or 1 to `--longest` with `--uneven`.

The share is FLOPs / seconds / rate. FLOPs are 2 a weight and token that is sampled or prefilled,
and 6 a weight and token that is trained, with each prompt once and the head for the scored tokens
only. What is computed again, attention and free slots are not counted. The rate is that of a
product of matrices of 2,048 rows and columns in the dtype of the layers, measured in each round.
"""

import argparse
import asyncio
import random
import statistics
import time

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from rl2.batch import Sample, collate
from rl2.config.schema import WorkerConfig
from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.local import LocalEngine
from rl2.model.exact import Exactness
from rl2.parallel.device import compute_dtype
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker

SUPERVISED_TOKENS = 512


def matrix_rate(dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOPs per second of the product of two matrices."""
    x = torch.randn(2048, 2048).to(dtype)
    x @ x
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        x @ x
        count += 1
    return count * 2 * 2048**3 / (time.perf_counter() - start)


def count_weights(model: str) -> tuple[int, int]:
    """Weights that a token is multiplied by: (of the layers, of the head)."""
    config = AutoConfig.from_pretrained(model)
    with init_empty_weights():
        hf = AutoModelForCausalLM.from_config(config)
    embedding = hf.get_input_embeddings().weight.numel()
    tied = config.get_text_config().tie_word_embeddings
    head = hf.get_output_embeddings().weight.numel()
    return hf.num_parameters() - embedding - (0 if tied else head), head


class Steps:
    """An engine and a worker with the same model, and their random prompts."""

    def __init__(self, arguments):
        self.arguments = arguments
        device = init_distributed()
        self.dtype = compute_dtype("auto", device)
        self.body, self.head = count_weights(arguments.model)
        self.num_answers = arguments.prompts * arguments.samples
        self.engine = LocalEngine(
            EngineSettings(
                arguments.model,
                self.dtype,
                device,
                max_running_requests=self.num_answers,
                exact=arguments.exact,
            )
        )
        config = WorkerConfig(
            model_name=arguments.model,
            gradient_checkpointing=False,
            max_length_per_device=4096,
            lr=1e-6,
        )
        exactness = Exactness.DEMANDED if arguments.exact else Exactness.OFF
        self.worker = Worker(config, device, num_updates=100, exactness=exactness)
        rng = random.Random(0)
        vocabulary = self.engine.model.config.vocab_size

        def draw(count):
            return [[rng.randrange(vocabulary) for _ in range(size)] for size in count]

        self.prompts = draw([arguments.length] * arguments.prompts)
        self.texts = draw([SUPERVISED_TOKENS] * arguments.prompts)
        self.lengths = [arguments.longest] * self.num_answers
        if arguments.uneven:
            self.lengths = [rng.randint(1, arguments.longest) for _ in range(self.num_answers)]

    def roll_out(self):
        """(batch, FLOPs)."""

        async def answer_all():
            calls = []
            for i, length in enumerate(self.lengths):
                prompt = self.prompts[i // self.arguments.samples]
                params = SamplingParams(max_new_tokens=length)
                calls.append(self.engine.generate(prompt, params, (0, i)))
            return await asyncio.gather(*calls)

        samples = []
        for i, answer in enumerate(self.engine.loop.run_until_complete(answer_all())):
            group = i // self.arguments.samples
            prompt = self.prompts[group]
            mask = [0] * len(prompt) + [1] * len(answer.tokens)
            logps = [0.0] * len(prompt) + answer.logps
            samples.append(Sample(prompt + answer.tokens, mask, logps, [0.0] * len(mask), group, i))
        prefilled = sum(map(len, self.prompts))
        sampled = sum(self.lengths)
        return collate(samples), 2 * ((self.body + self.head) * sampled + self.body * prefilled)

    def update(self, batch, num_tokens: int) -> float:
        """One update on a batch, whose packs have so many tokens. Returns the FLOPs."""
        batch.token_weights = batch.mask / batch.mask.sum()
        self.worker.update(batch, lambda batch, scores: (weighted_sum(batch, scores), {}))
        return 6 * (self.body * num_tokens + self.head * int(batch.mask.sum()))

    def run(self) -> dict[str, tuple[float, float]]:
        """(seconds, FLOPs) by phase."""
        phases = {}
        start = time.perf_counter()
        batch, flops = self.roll_out()
        phases["rollout"] = time.perf_counter() - start, flops
        start = time.perf_counter()
        flops = self.update(batch, sum(map(len, self.prompts)) + sum(self.lengths))
        phases["update"] = time.perf_counter() - start, flops
        phases["transfer"] = self.transfer(), 0.0
        phases["GRPO step"] = tuple(map(sum, zip(*phases.values(), strict=True)))
        zeros = [0.0] * SUPERVISED_TOKENS
        samples = []
        for i, text in enumerate(self.texts):
            samples.append(Sample(text, [0] + [1] * (len(text) - 1), zeros, zeros, i, i))
        batch = collate(samples)
        batch.old_logps = batch.engine_logps  # nothing has sampled them
        start = time.perf_counter()
        flops = self.update(batch, sum(map(len, self.texts)))
        phases["supervised step"] = time.perf_counter() - start, flops
        self.transfer()
        return phases

    def transfer(self) -> float:
        """Gives the engine the weights of the worker. Returns the seconds."""
        start = time.perf_counter()
        self.engine.load_weights(self.worker.iter_full_weights(self.dtype), self.worker.version)
        return time.perf_counter() - start


def weighted_sum(batch, scores):
    return (scores.logps * batch.token_weights).sum()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=94, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest answer")
    parser.add_argument("--uneven", action="store_true", help="answers of 1 to --longest tokens")
    parser.add_argument("--exact", type=lambda text: text == "true", default=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    steps = Steps(arguments)
    seconds, shares = {}, {}
    for i in range(arguments.rounds + 1):
        phases = steps.run()
        rate = matrix_rate(steps.dtype)
        for name, (elapsed, flops) in phases.items() if i else ():  # the first round warms up
            seconds.setdefault(name, []).append(elapsed)
            shares.setdefault(name, []).append(flops / elapsed / rate)
    print(f"{steps.dtype}, {torch.get_num_threads()} threads, {rate / 1e12:.3f} TFLOP/s at last")
    for name, column in seconds.items():
        share = statistics.median(shares[name])
        print(f"{name:16} {statistics.median(column):7.2f} s  {share:5.0%} of the matrix rate")


if __name__ == "__main__":
    main()
