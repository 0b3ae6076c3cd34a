"""Seconds of a decode step while threads of the environment compute in Python.

    python benchmarks/lab/env_threads.py MODEL [--threads 4] [--rows 16] [--steps 16]

Each case has another switch interval of the interpreter: the time after which a thread that
computes gives Python's lock to one that waits. `env` is the work that the threads did a second,
compared with the interval of 0.005 s that Python has by itself.
"""

import argparse
import asyncio
import sys
import threading
import time

import torch

from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.local import LocalEngine
from rl2.env.runners import SWITCH_SECONDS
from rl2.worker import compute_dtype

INTERVALS = (0.005, 0.0005, 0.0001)


class BusyThread(threading.Thread):
    """Computes in Python until `is_stopped`. `num_rounds` is the work done."""

    def __init__(self):
        super().__init__(daemon=True)
        self.is_stopped = False
        self.num_rounds = 0
        self.start()

    def run(self):
        while not self.is_stopped:
            sum(i * i for i in range(100))
            self.num_rounds += 1


def measure(engine, arguments, num_threads):
    """(seconds of a decode step, rounds of the threads a second)."""
    params = SamplingParams(max_new_tokens=arguments.steps)

    async def generate():
        calls = [engine.generate(range(5, 69), params, (0, i)) for i in range(arguments.rows)]
        await asyncio.gather(*calls)

    threads = [BusyThread() for _ in range(num_threads)]
    start = time.perf_counter()
    engine.loop.run_until_complete(generate())
    seconds = time.perf_counter() - start
    rounds = sum(thread.num_rounds for thread in threads)
    for thread in threads:
        thread.is_stopped = True
        thread.join()
    return seconds / arguments.steps, rounds / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = LocalEngine(
        EngineSettings(
            model_name=arguments.model,
            dtype=compute_dtype("auto", device),
            device=device,
            max_running_requests=arguments.rows,
        )
    )
    measure(engine, arguments, 0)  # a warm-up
    alone, _ = measure(engine, arguments, 0)
    print(f"{arguments.rows} rows, {torch.get_num_threads()} threads of PyTorch")
    print(f"no busy thread: {alone:.3f} s a step")
    env_speed = None
    for interval in INTERVALS:
        sys.setswitchinterval(interval)
        seconds, rounds = measure(engine, arguments, arguments.threads)
        env_speed = env_speed or rounds
        mark = "  <- rl2" if interval == SWITCH_SECONDS else ""
        print(
            f"{arguments.threads} busy threads, interval {interval:g} s: {seconds:.3f} s a step "
            f"(x{seconds / alone:.1f}), env x{rounds / env_speed:.2f}{mark}",
            flush=True,
        )


if __name__ == "__main__":
    main()
