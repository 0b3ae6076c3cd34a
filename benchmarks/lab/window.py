"""Seconds and peak memory of attention with a sliding window and without one, on one long document.

    python benchmarks/lab/window.py [--length 8192] [--window 512] [--repeats 3]

Measures a forward and a backward in bfloat16 with the heads of SmolLM2-135M. The variants take
turns, each run in its own process, and the medians of the ratios of neighbours are printed.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch

from rl2.attention.ring import PackedAttention

HEADS, KEY_HEADS, HEAD_SIZE = 9, 3, 64


def attend(length: int, window: int | None) -> None:
    heads = [
        torch.randn(1, n, length, HEAD_SIZE).bfloat16().requires_grad_()
        for n in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    attention = PackedAttention([[(length, 0)]], [], torch.device("cpu"))
    attention(None, *heads, HEAD_SIZE**-0.5, window).sum().backward()


def measure(length: int, window: int | None) -> dict[str, float]:
    attend(2 * (window or 64), window)  # starts kernels and threads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    attend(length, window)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": seconds, "mib": peak / 1024}


def measure_alone(length: int, window: int | None) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", "--length", str(length)]
    command += ["--window", str(window or 0)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.length, arguments.window or None)))
        return
    speed_ups, memory_shares = [], []
    for _ in range(arguments.repeats):
        full = measure_alone(arguments.length, None)
        windowed = measure_alone(arguments.length, arguments.window)
        print(
            f"full {full['seconds']:.2f} s, {full['mib']:.0f} MiB; window {arguments.window} "
            f"{windowed['seconds']:.2f} s, {windowed['mib']:.0f} MiB",
            flush=True,
        )
        speed_ups.append(full["seconds"] / windowed["seconds"])
        memory_shares.append(windowed["mib"] / full["mib"])
    print(
        f"{arguments.length} tokens: {statistics.median(speed_ups):.1f}x as fast, "
        f"{statistics.median(memory_shares):.2f} of the memory"
    )


if __name__ == "__main__":
    main()
