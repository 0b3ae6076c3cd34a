"""Useful tokens per second of the embedded engine against `model.generate` on the same model, dtype and prompts:

    python benchmarks/rollout.py MODEL [--groups 8] [--samples 8] [--prompt 94] [--longest 64]

- fixed: every answer has `longest` tokens;
- uneven: answers of 1 to `longest` tokens. `generate` runs until its longest one is done, as it does when answers stop.

Both sample at temperature 1 from the whole vocabulary; only the engine returns log-probabilities.
"""

import argparse
import asyncio
import random
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.local import LocalEngine
from rl2.worker import compute_dtype


def make_generate(arguments, dtype, prompts, device):
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(device).eval()
    inputs = torch.tensor(prompts, device=device)
    model.generation_config.eos_token_id = None
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}

    def play(lengths):
        config = GenerationConfig(max_new_tokens=max(lengths), **settings)
        out = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=config
        )
        assert out.shape[1] == inputs.shape[1] + max(lengths)

    return play


def make_engine(arguments, dtype, prompts, device, slots, deterministic):
    settings = EngineSettings(
        model_name=arguments.model,
        dtype=dtype,
        device=device,
        max_running_requests=slots,
        deterministic=deterministic,
    )
    engine = LocalEngine(settings)

    async def all_(lengths):
        calls = [
            engine.generate(prompt, SamplingParams(max_new_tokens=length), (0, i))
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        told = await asyncio.gather(*calls)
        assert [len(out.tokens) for out in told] == lengths

    return lambda lengths: engine.loop.run_until_complete(all_(lengths))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    for name, default in (
        ("groups", 8),
        ("samples", 8),
        ("prompt", 94),
        ("longest", 64),
        ("repeats", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, rng = compute_dtype("auto", device), random.Random(0)
    groups = [
        [rng.randrange(5, 1000) for _ in range(arguments.prompt)] for _ in range(arguments.groups)
    ]
    prompts = [prompt for prompt in groups for _ in range(arguments.samples)]
    num = len(prompts)
    players = {"model.generate": make_generate(arguments, dtype, prompts, device)}
    for deterministic in (False, True):
        for slots in (num, num // 2):
            name = f"engine, {slots} slots" + (", deterministic" if deterministic else "")
            players[name] = make_engine(arguments, dtype, prompts, device, slots, deterministic)
    cases = {
        "fixed": [arguments.longest] * num,
        "uneven": [rng.randint(1, arguments.longest) for _ in range(num)],
    }
    print(f"{num} prompts of {arguments.prompt} tokens, {dtype}, {torch.get_num_threads()} threads")
    for case, lengths in cases.items():
        seconds = {name: [] for name in players}
        for repeat in range(
            arguments.repeats + 1
        ):  # in turn, since machines drift; the first round warms up
            for name, play in players.items():
                start = time.perf_counter()
                play(lengths)
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
        base = statistics.median(seconds["model.generate"])
        for name, times in seconds.items():
            median = statistics.median(times)
            print(
                f"{case:7} {name:32} {median:6.2f} s  {sum(lengths) / median:6.0f} tokens/s  x{base / median:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
