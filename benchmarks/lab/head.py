"""Seconds and peak memory of the chunked head and of a plain linear layer with log_softmax.

    python benchmarks/lab/head.py [--positions 4096] [--hidden 576] [--vocabulary 49152]
        [--scored 1.0]

`plain` and `chunked_bf16` round the logits to bf16, `chunked` has them in fp32. Measures a forward
and a backward. The variants take turns, each run in its own process, and the
medians are printed. The memory does not include the gradient of the head's weight.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch

from rl2.model.head import HeadInputs, head_scores


def plain(hidden, weight, targets):
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def chunked(hidden, weight, targets):
    return head_scores(HeadInputs(hidden, weight), targets)[0]


def chunked_bf16(hidden, weight, targets):
    return head_scores(HeadInputs(hidden, weight, dtype=torch.bfloat16), targets)[0]


VARIANTS = {"plain": plain, "chunked": chunked, "chunked_bf16": chunked_bf16}


def measure(arguments) -> dict:
    torch.manual_seed(0)
    hidden = torch.randn(arguments.positions, arguments.hidden).bfloat16().requires_grad_()
    weight = torch.randn(arguments.vocabulary, arguments.hidden) * 0.05
    weight = weight.bfloat16().requires_grad_()
    targets = torch.randint(arguments.vocabulary, (arguments.positions,))
    scored = slice(None)
    if arguments.variant != "plain":
        scored = slice(0, int(arguments.positions * arguments.scored))
    function = VARIANTS[arguments.variant]
    # The warm-up starts kernels and threads, and allocates the gradient of the weight.
    function(hidden[:8], weight, targets[:8]).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    function(hidden[scored], weight, targets[scored]).sum().backward()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": seconds, "mib": peak / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument(
        "--scored",
        type=float,
        default=1.0,
        help="fraction of positions that the chunked head scores",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments)))
        return
    results = {variant: [] for variant in VARIANTS}
    for _ in range(arguments.repeats):
        for variant in results:
            command = [sys.executable, __file__, "--variant", variant, *sys.argv[1:]]
            output = subprocess.run(command, capture_output=True, check=True).stdout
            results[variant].append(json.loads(output.splitlines()[-1]))
    seconds, mib = {}, {}  # medians
    for variant, runs in results.items():
        seconds[variant] = statistics.median(run["seconds"] for run in runs)
        mib[variant] = statistics.median(run["mib"] for run in runs)
        print(f"{variant:12} {seconds[variant]:6.2f} s  {mib[variant]:7.0f} MiB extra at the peak")
    gradient_mib = arguments.vocabulary * arguments.hidden * 2 / 2**20
    for variant in ("chunked", "chunked_bf16"):
        print(
            f"{variant} / plain: time {seconds[variant] / seconds['plain']:.2f}, "
            f"memory {mib[variant] / mib['plain']:.3f} "
            f"(weight gradient: {gradient_mib:.0f} MiB)"
        )


if __name__ == "__main__":
    main()
