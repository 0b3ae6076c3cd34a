"""Planning of micro-batches on the lengths of a long-tailed reasoning run: quality and time,
against Karmarkar-Karp.

    python benchmarks/packing.py [--sequences 512] [--ranks 8] [--budget 32768] [--quadratic 2e-5]

Lengths are log-normal, 200 to 16,000 tokens; a sequence of n costs n + quadratic * n^2 (2e-5 is a
7B model's). Printed is the sum over micro-batches of the slowest rank's cost, over that of a
perfect balance, and what share of packed tokens is padding."""

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
        (_, i, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        both = sorted(a + b for a, b in zip(one, reversed(other), strict=True))
        heapq.heappush(heap, (both[0] - both[-1], i, both))
    return sorted(heap[0][2], reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("sequences", 512), ("ranks", 8), ("budget", 32768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quadratic", type=float, default=2e-5)
    arguments = parser.parse_args()
    rows = {"greedy": [], "Karmarkar-Karp": []}
    for seed in range(5):
        rng = random.Random(seed)
        lengths = [
            min(16000, max(200, int(rng.lognormvariate(7.6, 0.9))))
            for _ in range(arguments.sequences)
        ]
        costs = [n + arguments.attention_cost * n * n for n in lengths]
        ones = [([1] * (n + 1), [0] + [1] * n, [0.0] * (n + 1), [0.0] * (n + 1)) for n in lengths]
        batch = collate([Sample(*one, i, i) for i, one in enumerate(ones)])
        start = time.perf_counter()
        plans = plan_micro_batches(
            batch, arguments.budget, arguments.ranks, False, arguments.attention_cost
        )
        seconds = time.perf_counter() - start
        loads = [max(sum(costs[row] for row in part) for part in micro) for micro in plans]
        tokens = sum(
            pack(batch.select(part), False).tokens.numel() for micro in plans for part in micro
        )
        ideal = sum(costs) / arguments.ranks
        rows["greedy"].append((sum(loads) / ideal, seconds, 1 - sum(lengths) / tokens, len(plans)))
        start = time.perf_counter()
        loads = karmarkar_karp(costs, len(plans) * arguments.ranks)
        seconds = time.perf_counter() - start
        rows["Karmarkar-Karp"].append(
            (sum(loads[:: arguments.ranks]) / ideal, seconds, 0.0, len(plans))
        )
    for name, found in rows.items():
        slowest, seconds, padding, micro = (
            statistics.median(column) for column in zip(*found, strict=True)
        )
        worst = max(row[0] for row in found)
        print(
            f"{name:15} slowest rank / perfect {slowest:.4f} (worst of {len(found)}: "
            f"{worst:.4f})  {seconds * 1e3:7.1f} ms"
            f"  padding {padding:.2%}  {micro:.0f} micro-batches"
        )


if __name__ == "__main__":
    main()
