"""Prints the commands that run all parts on a machine that is lent for some minutes a call.

    python tests/gpu/calls.py [--budget SECONDS] [--setup COMMANDS] [--sglang-args ARGS]

Each command fits in one call: its parts may take `--budget` seconds together, setup included.
Calls that come one behind the other on the same machine share the models and the outcomes in
/tmp/rl2-gpu, so a part is skipped where one that it needs has failed in an earlier call. On a new
machine all of it is made again. The tables are in $OUT, the folder whose files come back.

`--setup` is a command that installs what the machine lacks. It must take no time where it has run
before. `--sglang-args` are arguments of SGLang's engine.
"""

import argparse
import shlex

from parts import PARTS

# What a short loan should tell first comes first.
CALLS = {
    "the trainer": (
        "facts device attention worker offload resume head flash_attn utilisation_8k"
    ).split(),
    "SGLang": "sglang_facts sglang_contract sglang".split(),
    "7B, and whole runs": "sglang_7b sglang_grpo".split(),
    "evaluations, pauses, resuming": (
        "sglang_eval sglang_partial sglang_resume sglang_cycles"
    ).split(),
    "speed": "variants_8k published_16k published_65k published_lora plan".split(),
    "the rest": ("memory_7b utilisation_32k local_contract local_throughput local_grpo").split(),
    "a real model": ["quickstart"],
    "two GPUs": "ring fsdp hybrid tensor sglang_two".split(),
}
FOLDER = "/tmp/rl2-gpu"


def command(parts: list[str], budget: int, setup: str, sglang_args: str) -> str:
    """The command of one call."""
    steps = [setup] if setup else []
    run = f"RL2_GPU_MODELS=${{RL2_GPU_MODELS:-{FOLDER}}} bash tests/gpu/run.sh --out $OUT"
    if sglang_args:
        run = f"SGLANG_ARGS={shlex.quote(sglang_args)} {run}"
    # SECONDS is what the setup took.
    steps.append(f"{run} --budget $(({budget} - SECONDS)) {' '.join(parts)}")
    return " && ".join(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=int, default=560, help="seconds of one call")
    parser.add_argument("--setup", default="", help="installs what the machine lacks")
    parser.add_argument("--sglang-args", default="", help="key=value arguments of its engine")
    arguments = parser.parse_args()
    for number, (title, parts) in enumerate(CALLS.items(), 1):
        limit = sum(PARTS[part].limit for part in parts)
        print(f"# {number}. {title}: at most {min(limit, arguments.budget)} s")
        print(command(parts, arguments.budget, arguments.setup, arguments.sglang_args) + "\n")


if __name__ == "__main__":
    main()
