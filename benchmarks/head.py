"""The chunked head against a plain linear + log_softmax: seconds and peak extra memory of a forward
and backward.

    python benchmarks/head.py [--positions 4096] [--hidden 576] [--vocabulary 49152] [--scored 1.0]

Each variant runs in processes of its own, in turn; medians are printed. The head's weight gradient
is not counted."""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch

from rl2.model.head import head_scores


def plain(hidden, weight, targets):
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def chunked(hidden, weight, targets):
    return head_scores(hidden, weight, targets)[0]


def measure(arguments) -> dict:
    torch.manual_seed(0)
    hidden = torch.randn(arguments.positions, arguments.hidden).bfloat16().requires_grad_()
    weight = (
        (torch.randn(arguments.vocabulary, arguments.hidden) * 0.05).bfloat16().requires_grad_()
    )
    targets = torch.randint(arguments.vocabulary, (arguments.positions,))
    scored = (
        slice(0, int(arguments.positions * arguments.scored))
        if arguments.variant == "chunked"
        else slice(None)
    )
    function = {"plain": plain, "chunked": chunked}[arguments.variant]
    function(
        hidden[:8], weight, targets[:8]
    ).sum().backward()  # kernels, threads and the gradient's memory
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
        "--scored", type=float, default=1.0, help="share of positions that the chunked head scores"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variant", choices=["plain", "chunked"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments)))
        return
    found = {"plain": [], "chunked": []}
    for _ in range(arguments.repeats):
        for variant, results in found.items():
            out = subprocess.run(
                [sys.executable, __file__, "--variant", variant, *sys.argv[1:]],
                capture_output=True,
                check=True,
            )
            results.append(json.loads(out.stdout.splitlines()[-1]))
    middle = {v: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for v, rs in found.items()}
    gradient = (
        arguments.vocabulary * arguments.hidden * 2 / 2**20
    )  # a second copy while it is accumulated
    for variant, figures in middle.items():
        print(
            f"{variant:8} {figures['seconds']:6.2f} s  {figures['mib']:7.0f} MiB extra at the peak"
        )
    ratio = {k: middle["chunked"][k] / middle["plain"][k] for k in ("seconds", "mib")}
    print(
        f"chunked / plain: time {ratio['seconds']:.2f}, memory {ratio['mib']:.3f} (weight "
        f"gradient: {gradient:.0f} MiB)"
    )


if __name__ == "__main__":
    main()
