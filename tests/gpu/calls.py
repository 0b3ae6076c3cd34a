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
CALLS = {  # title -> the first part of the call; it has all parts up to the next call
    "the trainer": "facts",
    "SGLang": "sglang_facts",
    "7B, and whole runs": "sglang_7b",
    "evaluations, pauses, resuming": "sglang_eval",
    "speed, memory, the embedded engine": "variants_8k",
    "vLLM": "vllm_contract",
    "a real model": "quickstart",
    "two GPUs": "ring",
}
FOLDER = "/tmp/rl2-gpu"


def parts_of_calls() -> dict[str, list[str]]:
    """Title -> the names of its parts."""
    titles = {first: title for title, first in CALLS.items()}
    calls: dict[str, list[str]] = {}
    for name in PARTS:
        if name in titles:
            title = titles[name]
            calls[title] = []
        calls[title].append(name)
    return calls


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
    for number, (title, parts) in enumerate(parts_of_calls().items(), 1):
        limit = sum(PARTS[part].limit for part in parts)
        print(f"# {number}. {title}: at most {min(limit, arguments.budget)} s")
        print(command(parts, arguments.budget, arguments.setup, arguments.sglang_args) + "\n")


if __name__ == "__main__":
    main()
