"""`rl2 prove [--processes N] key=value ...`: rl2's proofs on your model and layout.

The keys are those of the PPO trainer. Each row compares two computations that should be equal and
prints the largest difference. The proofs are in proofs.py and outer_proofs.py.
"""

import contextlib
import io
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from typing import NamedTuple

import torch.distributed as dist
import transformers

from rl2.config.parse import parse
from rl2.config.problem import general_problem, refuse
from rl2.config.schema import PPOConfig
from rl2.data.examples import PROMPT_ROWS
from rl2.data.rows import load_rows
from rl2.model.folder import load_tokenizer
from rl2.tools.options import prove_parser
from rl2.tools.outer_proofs import prove_engine, prove_export, prove_template
from rl2.tools.proofs import (
    Difference,
    Skipped,
    Subject,
    nan_is_largest,
    prove_layout,
    prove_packed,
    prove_real_weights,
    prove_transformers,
)
from rl2.trainer.inputs import make_chat_template

# Keys of what need not be on this machine.
ELSEWHERE = (
    "data.test_path",
    "data.test_ratio",
    "data.test_limit",
    "rollout.env_path",
    "rollout.engine",
    "rollout.engine_args",
    "rollout.tp_size",
    "trainer.resume",
)
MOST_ROWS = 8  # of the data
MOST_SHOWN = 5  # differences of a row
USER, ASSISTANT = "user", "assistant"
ROLES = {"system", USER, ASSISTANT}
CONVERSATION = [
    {"role": USER, "content": "What is 3 + 4?"},
    {"role": ASSISTANT, "content": "It is 7."},
    {"role": USER, "content": "And twice that?\nThink again."},
    {"role": ASSISTANT, "content": "Twice 7\nis 14."},
]


class Row(NamedTuple):
    """A proof and the rows whose faults it would show too."""

    proof: Callable[[Subject], Iterator[Difference]]
    compared: str
    needs: tuple[str, ...] = ()


TRAINER = ("transformers", "packed")
ROWS = {
    "transformers": Row(prove_transformers, "rl2 = transformers, small copy in float32"),
    "real weights": Row(
        prove_real_weights, "rl2 = transformers, all of it in bfloat16", TRAINER[:1]
    ),
    "packed": Row(prove_packed, "a pack = each sequence alone", TRAINER[:1]),
    "layout": Row(prove_layout, "asked layout = one process", TRAINER),
    "engine": Row(prove_engine, "embedded engine = trainer", TRAINER),
    "template": Row(prove_template, "turn by turn = the whole conversation"),
    "export": Row(prove_export, "exported folder = the trained model", TRAINER),
}


class Result(NamedTuple):
    verdict: str  # ok, DIFFERENT, or skipped
    worst: Difference | None
    reason: str = ""  # of a skip or of a failure


def run_row(
    row: Row, subject: Subject, results: dict[str, Result]
) -> tuple[Result, list[Difference]]:
    """Runs a proof. Returns (result, all that differs)."""
    differences: list[Difference] = []
    failure = ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for difference in row.proof(subject):
                differences.append(difference)
    except Skipped as skip:
        return Result("skipped", None, str(skip)), []
    except Exception as error:  # whatever a strange model does
        failure = f"it does not run: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
    worst = max(differences[::-1], key=lambda found: (_excess(found), found.limit), default=None)
    wrong = [difference for difference in differences if not difference.is_ok]
    if not wrong and not failure:
        return Result("ok", worst), []
    for name in row.needs:
        if results[name].verdict == "DIFFERENT":
            reason = f"it differs too, but so does {name}, on which it builds: fix that first"
            return Result("skipped", worst, reason), []
    return Result("DIFFERENT", worst, failure), wrong


def _excess(difference: Difference) -> float:
    """Returns the difference in units of its limit."""
    largest = nan_is_largest(difference.largest)
    return largest / difference.limit if difference.limit else largest


def _describe(difference: Difference) -> str:
    """Returns the difference, its limit and its place, in words."""
    text = f"{difference.what}: {difference.largest:.2g}, limit {difference.limit:g}"
    return f"{text}, {difference.where}" if difference.where else text


def prove(subject: Subject) -> bool:
    """Runs all rows and prints them with a table. Returns whether none differs."""
    results: dict[str, Result] = {}
    for name, row in ROWS.items():
        start = time.monotonic()
        results[name], wrong = run_row(row, subject, results)
        verdict, worst, reason = results[name]
        text = reason or (_describe(worst) if worst else "")
        print(f"{name:13} {verdict:10} {time.monotonic() - start:5.1f} s  {text}", flush=True)
        for difference in wrong[:MOST_SHOWN]:
            print(f"    {_describe(difference)}\n      usually: {difference.meaning}", flush=True)
    print(f"\n{'row':13} {'compared':43} {'largest':>8} {'limit':>7}  verdict")
    for name, (verdict, worst, _) in results.items():
        numbers = f"{worst.largest:8.2g} {worst.limit:7.2g}" if worst else f"{'-':>8} {'-':>7}"
        print(f"{name:13} {ROWS[name].compared:43} {numbers}  {verdict}")
    return all(result.verdict != "DIFFERENT" for result in results.values())


def read_conversations(config: PPOConfig) -> list[tuple[list[dict], list | None]]:
    """Returns a built-in conversation, and the first rows of the data, followed by more turns."""
    conversations: list[tuple[list[dict], list | None]] = [(CONVERSATION, None)]
    for path in filter(None, config.data.train_paths.values()):
        rows = load_rows(path, "train", PROMPT_ROWS.read, config.data.columns, MOST_ROWS)
        for i in range(min(len(rows), MOST_ROWS)):
            row = rows[i]
            prompt = row["messages"]
            # Templates treat other roles differently, and rl2 evens that out.
            if not isinstance(prompt, str) and {message["role"] for message in prompt} <= ROLES:
                conversations.append(([*prompt, *CONVERSATION[1:]], row.get("tools")))
    return conversations


def main() -> None:
    """Exits with status 1 if a row is different, 2 for a wrong command."""
    parser = prove_parser()
    arguments, words = parser.parse_known_args()
    if arguments.processes < 1:
        parser.error(f"--processes {arguments.processes}: expected at least 1")
    os.environ["WORLD_SIZE"] = str(arguments.processes)
    config = parse(PPOConfig, words, elsewhere=ELSEWHERE, optional=("data.path",))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["rl2.tools.proofs"])
    try:
        tokenizer = load_tokenizer("actor.model_name", config.actor.model_name)
        template = make_chat_template(config.data, tokenizer, date.today().isoformat())
        conversations = read_conversations(config)
    except ValueError as error:
        refuse([general_problem(str(error))])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="rl2_prove_") as folder:
        subject = Subject(config, arguments.processes, template, conversations, folder)
        is_proved = prove(subject)
    dist.destroy_process_group()
    sys.exit(0 if is_proved else 1)


if __name__ == "__main__":
    main()
