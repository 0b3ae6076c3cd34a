"""Quality and time of the planning of micro-batches, compared with Karmarkar-Karp.

    python benchmarks/lab/packing.py [--sequences 512] [--ranks 8] [--budget 32768]
        [--attention-cost 2e-5]

The lengths are those of a long-tailed reasoning run: log-normal, 200 to 16,000 tokens. A sequence
of n tokens costs n + attention_cost * n^2; 2e-5 is the value for a 7B model. The benchmark prints
the sum over micro-batches of the cost of the slowest rank, divided by that of a perfect balance,
and the fraction of packed tokens that is padding.
"""

import argparse
import heapq
import random
import statistics
import time

from rl2.batch import Sample, collate
from rl2.packing import pack, plan_micro_batches


def karmarkar_karp(costs: list[float], num_bins: int) -> list[float]:
    """Loads of the bins by the largest differencing method."""
    heap = [(-cost, i, [0.0] * (num_bins - 1) + [cost]) for i, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, i, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = sorted(a + b for a, b in zip(first, reversed(second), strict=True))
        heapq.heappush(heap, (merged[0] - merged[-1], i, merged))
    return sorted(heap[0][2], reverse=True)


def make_lengths(rng: random.Random, count: int) -> list[int]:
    return [min(16000, max(200, int(rng.lognormvariate(7.6, 0.9)))) for _ in range(count)]


def make_sample(length: int, i: int) -> Sample:
    zeros = [0.0] * (length + 1)
    return Sample([1] * (length + 1), [0] + [1] * length, zeros, zeros, i, i)


def measure(lengths: list[int], arguments) -> dict[str, tuple[float, float, float, int]]:
    """{method: (slowest rank / perfect balance, seconds, padding, number of micro-batches)}."""
    costs = [n + arguments.attention_cost * n * n for n in lengths]
    ideal = sum(costs) / arguments.ranks
    batch = collate([make_sample(n, i) for i, n in enumerate(lengths)])
    limits = (arguments.budget, arguments.ranks)
    start = time.perf_counter()
    plans = plan_micro_batches(batch, *limits, False, arguments.attention_cost)
    greedy_seconds = time.perf_counter() - start
    slowest, num_tokens = 0.0, 0
    for micro_batch in plans:
        slowest += max(sum(costs[row] for row in rows) for rows in micro_batch)
        num_tokens += sum(pack(batch.select(rows), False).tokens.numel() for rows in micro_batch)
    padding = 1 - sum(lengths) / num_tokens
    start = time.perf_counter()
    loads = karmarkar_karp(costs, len(plans) * arguments.ranks)
    seconds = time.perf_counter() - start
    return {
        "greedy": (slowest / ideal, greedy_seconds, padding, len(plans)),
        "Karmarkar-Karp": (sum(loads[:: arguments.ranks]) / ideal, seconds, 0.0, len(plans)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--budget", type=int, default=32768)
    parser.add_argument("--attention-cost", type=float, default=2e-5)
    arguments = parser.parse_args()
    results = {"greedy": [], "Karmarkar-Karp": []}
    for seed in range(5):
        lengths = make_lengths(random.Random(seed), arguments.sequences)
        for method, result in measure(lengths, arguments).items():
            results[method].append(result)
    for method, runs in results.items():
        medians = [statistics.median(column) for column in zip(*runs, strict=True)]
        slowest, seconds, padding, num_micro_batches = medians
        worst = max(run[0] for run in runs)
        print(
            f"{method:15} slowest rank / perfect {slowest:.4f} "
            f"(worst of {len(runs)}: {worst:.4f})  {seconds * 1e3:7.1f} ms"
            f"  padding {padding:.2%}  {num_micro_batches:.0f} micro-batches"
        )


if __name__ == "__main__":
    main()
