"""A simulation of rollout.num_processes on many GPUs: seconds of a step by a roofline.

    python benchmarks/lab/overlap_simulation.py [--gpus 8 64] [--spreads 0.4 0.8 1.2] [--steps 40]

Nothing is measured: steps of GRPO with the shape of Qwen2.5-7B are laid out by the rates of
rl2/tools/step_time.py, on bounds of H100s. Each GPU has 128 answers in a step, 16 to a prompt of
512 tokens. Their lengths are drawn anew in every step: log-normal, half of them above 1,024 tokens,
at most 16,384. `spread` is the standard deviation of the logarithm.

    together    all processes sample, then all train
    N ahead     some sample while the others train, with rollout.max_staleness=N; as many as make
                the steps fastest
    N ahead, each engine on its own
                not built: an engine begins the next rollout when its part of the one before is
                done, and not when all engines are

Weights reach the engines of "N ahead" through host memory, as in rl2/parallel/worlds.py, and cost
both sides the time of a copy to it at 4 GB/s; `--copy-rate` is another rate. Together they cost
nothing. The table is in Markdown.
"""

import argparse
import functools
import random
import statistics
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from transformers import Qwen2Config  # noqa: E402

from rl2.tools.step_time import (  # noqa: E402
    WEIGHT_BYTES,
    Rollout,
    count_costs,
    engine_seconds,
    log_normal_lengths,
    training_seconds,
)

MODEL = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
PROMPT, SAMPLES, ANSWERS_PER_GPU = 512, 16, 128
MEDIAN, LONGEST = 1024, 16384
MAX_RUNNING = 256  # of an engine, on one GPU
AHEAD = (1, 2)
NUM_LEFT_OUT = 5  # the first steps of a run, in which the reserve is filled


def finish_times(
    sampling: list[list[float]], training: list[float], ahead: int, copy: float
) -> list[float]:
    """The moments at which the training steps end. `sampling` has the seconds of each engine.

    Step k trains on rollout k, which is sampled with the weights after step k-1-ahead. A copy of
    weights takes both sides `copy` seconds.
    """
    sampled = [0.0] * len(sampling[0])  # by engine
    trained: list[float] = []
    for k, (engines, train) in enumerate(zip(sampling, training, strict=True)):
        ready, load = (trained[k - 1 - ahead], copy) if k > ahead else (0.0, 0.0)
        sampled = [max(end, ready) + load + own for end, own in zip(sampled, engines, strict=True)]
        free = trained[-1] + copy if trained else 0.0
        trained.append(max(free, *sampled) + train)
    return trained


def mean_step(ends: list[float]) -> float:
    return (ends[-1] - ends[NUM_LEFT_OUT - 1]) / (len(ends) - NUM_LEFT_OUT)


def simulate(num_gpus: int, spread: float, arguments) -> None:
    """Prints the rows of a number of GPUs and a spread."""
    costs = count_costs(MODEL)
    copy = WEIGHT_BYTES * costs.weights / (arguments.copy_rate * 1e9)
    rng = random.Random(f"{num_gpus} {spread}")
    count = num_gpus * ANSWERS_PER_GPU
    rollouts = [
        Rollout(PROMPT, SAMPLES, log_normal_lengths(count, MEDIAN, spread, LONGEST, rng))
        for _ in range(arguments.steps)
    ]

    @functools.cache
    def sample(num: int) -> list[list[float]]:
        return [engine_seconds(costs, rollout, num, 1, MAX_RUNNING) for rollout in rollouts]

    @functools.cache
    def train(num: int) -> list[float]:
        return [training_seconds([], [(costs, 1)], rollout, num, False) for rollout in rollouts]

    def mean_of_slowest(num: int) -> float:
        return statistics.fmean(max(engines) for engines in sample(num)[NUM_LEFT_OUT:])

    def print_row(kind: str, split: str, step: float, num: int, num_trainers: int) -> None:
        training = statistics.fmean(train(num_trainers)[NUM_LEFT_OUT:])
        seconds = [f"{value:.1f}" for value in (step, mean_of_slowest(num), training)]
        cells = [str(num_gpus), str(spread), kind, split, *seconds, f"{together / step:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)

    together = mean_of_slowest(num_gpus) + statistics.fmean(train(num_gpus)[NUM_LEFT_OUT:])
    print_row("together", "", together, num_gpus, num_gpus)
    unit = max(1, num_gpus // 16)
    for ahead, is_alone in product(AHEAD, (False, True)):
        steps = {}
        for num in range(unit, num_gpus, unit):
            seconds = sample(num)
            if not is_alone:
                seconds = [[max(engines)] for engines in seconds]
            ends = finish_times(seconds, train(num_gpus - num), ahead, copy)
            steps[num] = mean_step(ends)
        best = min(steps, key=steps.__getitem__)
        kind = f"{ahead} ahead{', each engine on its own' if is_alone else ''}"
        print_row(kind, f"{best} + {num_gpus - best}", steps[best], best, num_gpus - best)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--spreads", type=float, nargs="+", default=[0.4, 0.8, 1.2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--copy-rate", type=float, default=4.0, help="GB/s")
    arguments = parser.parse_args()
    if arguments.steps <= NUM_LEFT_OUT:
        parser.error(f"--steps must be above {NUM_LEFT_OUT}")
    print(
        "| GPUs | spread | kind | sampling + training | step, s | sampling | training | speedup |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for num_gpus in arguments.gpus:
        for spread in arguments.spreads:
            simulate(num_gpus, spread, arguments)


if __name__ == "__main__":
    main()
