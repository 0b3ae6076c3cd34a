"""Useful tokens per second of the embedded engine and of `model.generate`.

    python benchmarks/rollout.py MODEL [--groups 8] [--samples 8] [--prompt 94] [--longest 64]

- fixed: every answer has `longest` tokens.
- uneven: the answers have 1 to `longest` tokens. `generate` runs until the longest answer ends, as
  it does when answers stop.

The model, the dtype and the prompts are the same. Both sample at temperature 1 from the whole
vocabulary. Only the engine returns log-probabilities.
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


def make_generate(model_name, dtype, prompts, device):
    """A function that answers all prompts with `model.generate`. It takes the answers' lengths."""
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype).to(device).eval()
    inputs = torch.tensor(prompts, device=device)
    model.generation_config.eos_token_id = None

    def play(lengths):
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


def make_engine(settings, prompts):
    """The same with an embedded engine instead of `model.generate`."""
    engine = LocalEngine(settings)

    async def generate_all(lengths):
        calls = []
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            params = SamplingParams(max_new_tokens=length)
            calls.append(engine.generate(prompt, params, (0, i)))
        generations = await asyncio.gather(*calls)
        assert [len(out.tokens) for out in generations] == lengths

    return lambda lengths: engine.loop.run_until_complete(generate_all(lengths))


def make_players(model_name, dtype, prompts, device):
    """{name: function that answers all prompts}. The functions take the length of each answer."""
    players = {"model.generate": make_generate(model_name, dtype, prompts, device)}
    kinds = {"": (False, False), ", deterministic": (True, False), ", exact": (True, True)}
    for kind, (deterministic, exact) in kinds.items():
        for slots in (len(prompts), len(prompts) // 2):
            settings = EngineSettings(
                model_name=model_name,
                dtype=dtype,
                device=device,
                max_running_requests=slots,
                deterministic=deterministic,
                exact=exact,
            )
            players[f"engine, {slots} slots{kind}"] = make_engine(settings, prompts)
    return players


def measure(players, lengths, repeats):
    """Median seconds of each player.

    The players take turns, since the speed of a machine drifts. The first round is a warm-up.
    """
    seconds = {name: [] for name in players}
    for repeat in range(repeats + 1):
        for name, play in players.items():
            start = time.perf_counter()
            play(lengths)
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
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = compute_dtype("auto", device)
    rng = random.Random(0)
    prompts = []
    for _ in range(arguments.groups):
        prompt = [rng.randrange(5, 1000) for _ in range(arguments.prompt)]
        prompts += [prompt] * arguments.samples
    players = make_players(arguments.model, dtype, prompts, device)
    num = len(prompts)
    cases = {
        "fixed": [arguments.longest] * num,
        "uneven": [rng.randint(1, arguments.longest) for _ in range(num)],
    }
    print(f"{num} prompts of {arguments.prompt} tokens, {dtype}, {torch.get_num_threads()} threads")
    for case, lengths in cases.items():
        medians = measure(players, lengths, arguments.repeats)
        for name, seconds in medians.items():
            rate = f"{seconds:6.2f} s  {sum(lengths) / seconds:6.0f} tokens/s"
            speedup = medians["model.generate"] / seconds
            print(f"{case:7} {name:32} {rate}  x{speedup:.2f}", flush=True)


if __name__ == "__main__":
    main()
