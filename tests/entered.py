"""Prints how much of rl2 a tiny run enters: what a reader of the run has to know.

    python tests/entered.py

A line for a step of GRPO, one for the whole run around it, and one for a run of SFT, each with
files, functions and lines. A function counts with all its lines once it is called.
"""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import rl2

ROOT = f"{Path(rl2.__file__).parent}/"
RUNS = {
    "ppo": "rollout.env_path=env.py algo=grpo data.prompts_per_rollout=2 "
    "data.responses_per_prompt=2 rollout.train_sampling_params.max_new_tokens=4",
    "sft": "data.batch_size=2",
}


def count(codes) -> str:
    """Files, functions and lines of code objects; comprehensions count for their lines only."""
    functions = [code for code in codes if code.co_flags & 1]  # no modules, no bodies of classes
    lines = set()
    for code in functions:
        last = max(line for *_, line in code.co_lines() if line)
        lines |= {(code.co_filename, line) for line in range(code.co_firstlineno, last + 1)}
    named = [code for code in functions if not code.co_name.startswith("<")]
    files = {code.co_filename for code in functions}
    return f"{len(files):4} files {len(named):4} functions {len(lines):6,} lines"


def measure(trainer: str, keys: list[str]) -> None:
    """Runs a trainer in this process and prints what it enters."""
    entered, in_step, depth = set(), set(), [0]

    def see(frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(ROOT):
            return
        if code.co_name == "train_step":
            depth[0] += {"call": 1, "return": -1}.get(event, 0)
        if event == "call":
            entered.add(code)
            if depth[0]:
                in_step.add(code)

    sys.argv = [trainer, *keys]
    threading.setprofile(see)
    sys.setprofile(see)
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_module(f"rl2.trainer.{trainer}", run_name="__main__")
    sys.setprofile(None)
    if in_step:
        print(f"{'train_step':12}{count(in_step)}")
    print(f"{'run of ' + trainer:12}{count(entered)}", flush=True)


def main() -> None:
    from common import make_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        row = {"prompt": "a", "completion": "b"}
        Path(folder, "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
        Path(folder, "env.py").write_text("def reward_fn(messages): return 1.0\n")
        keys = f"data.path=rows.jsonl actor.model_name={model} trainer.max_steps=1 "
        for trainer, others in RUNS.items():
            keys_of_run = f"{keys}{others} trainer.experiment_name={trainer}".split()
            command = [sys.executable, __file__, trainer, *keys_of_run]
            subprocess.run(command, cwd=folder, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], sys.argv[2:])
        os._exit(0)  # as the process group of the run may be left
    main()
