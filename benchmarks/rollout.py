"""Useful tokens per second of the embedded engine, of `model.generate` and, with --vllm, of vLLM.

    python benchmarks/rollout.py MODEL [--groups 8] [--samples 8] [--prompt 94] [--longest 64]

    source tests/vllm_cpu/install.sh     # makes .venv-vllm, once
    .venv-vllm/bin/python benchmarks/rollout.py MODEL --vllm

- fixed: every answer has `longest` tokens.
- uneven: the answers have 1 to `longest` tokens. `generate` runs until the longest answer ends, as
  it does when answers stop.

The model, the dtype and the prompts are the same. All sample at temperature 1 from the whole
vocabulary. Only the engines return log-probabilities. The answers to a prompt share its keys and
values in both engines. Each round has prompts of its own, so that none is known from another round.
"""

import argparse
import asyncio
import pkgutil
import random
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from rl2.config.engines import ENGINES
from rl2.engine.base import EngineSettings, SamplingParams
from rl2.parallel.device import compute_dtype
from rl2.parallel.mesh import init_distributed


def make_generate(model_name, dtype, device):
    """A function that answers prompts with `model.generate`. It takes them and the lengths."""
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None

    def play(prompts, lengths):
        inputs = torch.tensor(prompts, device=device)
        config = GenerationConfig(
            max_new_tokens=max(lengths),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
        )
        outputs = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=config
        )
        assert outputs.shape[1] == inputs.shape[1] + max(lengths)

    return play


def make_engine(settings, kind="local"):
    """The same with an engine instead of `model.generate`."""
    engine = pkgutil.resolve_name(ENGINES[kind])(settings)

    async def generate_all(prompts, lengths):
        calls = []
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            params = SamplingParams(max_new_tokens=length)
            calls.append(engine.generate(prompt, params, (0, i)))
        generations = await asyncio.gather(*calls)
        assert [len(out.tokens) for out in generations] == lengths

    def play(prompts, lengths):
        engine.loop.run_until_complete(generate_all(prompts, lengths))

    return play


def make_players(model_name, dtype, num_prompts, device, with_vllm):
    """{name: function that answers prompts}. The functions take the prompts and the length of each
    answer.
    """
    players = {"model.generate": make_generate(model_name, dtype, device)}
    kinds = {"": (False, False), ", deterministic": (True, False), ", exact": (True, True)}
    for kind, (deterministic, exact) in kinds.items():
        for slots in (num_prompts, num_prompts // 2):
            settings = EngineSettings(
                model_name=model_name,
                dtype=dtype,
                device=device,
                max_running_requests=slots,
                deterministic=deterministic,
                exact=exact,
            )
            players[f"engine, {slots} slots{kind}"] = make_engine(settings)
    if with_vllm:
        for slots in (num_prompts, num_prompts // 2):
            settings = EngineSettings(
                model_name=model_name, dtype=dtype, device=device, max_running_requests=slots
            )
            players[f"vLLM, {slots} slots"] = make_engine(settings, "vllm")
    return players


def measure(players, make_prompts, lengths, repeats):
    """Median seconds of each player.

    The players take turns, since the speed of a machine drifts. The first round is a warm-up.
    """
    seconds = {name: [] for name in players}
    for repeat in range(repeats + 1):
        prompts = make_prompts()
        for name, play in players.items():
            start = time.perf_counter()
            play(prompts, lengths)
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=94)
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm", action="store_true")
    arguments = parser.parse_args()
    device = init_distributed()
    dtype = compute_dtype("auto", device)
    rng = random.Random(0)

    def make_prompts():
        prompts = []
        for _ in range(arguments.groups):
            prompt = [rng.randrange(5, 1000) for _ in range(arguments.prompt)]
            prompts += [prompt] * arguments.samples
        return prompts

    num = arguments.groups * arguments.samples
    players = make_players(arguments.model, dtype, num, device, arguments.vllm)
    cases = {
        "fixed": [arguments.longest] * num,
        "uneven": [rng.randint(1, arguments.longest) for _ in range(num)],
    }
    print(f"{num} prompts of {arguments.prompt} tokens, {dtype}, {torch.get_num_threads()} threads")
    for case, lengths in cases.items():
        medians = measure(players, make_prompts, lengths, arguments.repeats)
        for name, seconds in medians.items():
            rate = f"{seconds:6.2f} s  {sum(lengths) / seconds:6.0f} tokens/s"
            speedup = medians["model.generate"] / seconds
            print(f"{case:7} {name:32} {rate}  x{speedup:.2f}", flush=True)


if __name__ == "__main__":
    main()
