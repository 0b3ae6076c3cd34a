"""The command line around the commands: `rl2 COMMAND` and --help."""

import re
import subprocess
import sys

import pytest

from rl2.__main__ import COMMANDS
from rl2.config.schema import TRAINER_CONFIGS

HEAVY = {"torch", "transformers"}  # they take seconds to import


def imports_of(*arguments: str) -> tuple[set[str], subprocess.CompletedProcess]:
    """(the top packages that `python ARGUMENTS` imports, the process after its end)."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return set(re.findall(r"^import time:.*\| +(\w+)", done.stderr, re.MULTILINE)), done


@pytest.mark.parametrize(
    "arguments",
    [["-m", "rl2", name, "--help"] for name in COMMANDS]
    + [["-m", f"rl2.trainer.{name}", "--help"] for name in TRAINER_CONFIGS]
    + [["-m", "rl2.trainer.ppo", "--help", "rollout"], ["-m", "rl2"], ["-m", "rl2", "--version"]],
    ids=" ".join,
)
def test_help_comes_before_heavy_imports(arguments):
    imported, done = imports_of(*arguments)
    assert done.returncode == 0 and done.stdout
    assert "rl2" in imported and not imported & HEAVY


def test_the_schema_needs_no_heavy_import():
    imported, done = imports_of("-c", "import rl2.config.schema")
    assert done.returncode == 0 and "rl2" in imported and not imported & HEAVY


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["rl2", "push", "runs/x"], "hf upload"),
        (["rl2", "diff", "runs/x", "runs/y"], "rl2 replay"),
        (["rl2", "prove", "actor.model_name=x"], "docs/proofs.md"),
        (["rl2", "env", "gsm8k", "data.path=x", "--attack"], "weight 0"),
        (["rl2", "env", "gsm8k", "actor.model_name=x"], "trainer.eval_only=true"),
        (["rl2", "chat", "runs/x", "--best"], "RUN/best_model"),
        (["rl2", "chat", "runs/x", "--temperature=1"], "transformers chat"),
        (["rl2.trainer.sft", "--plan"], "rl2 plan"),
        (["rl2", "plan", "--prompt-tokens", "9"], "time/wait"),
        (["rl2.trainer.dpo", "actor.gradient_checkpointing=auto"], "rl2 plan"),
        (["rl2.trainer.sft", "trainer.loggers=[tensorboard]"], "metrics.jsonl"),
        (["rl2.trainer.sft", "rollout.env_path=env.py", "rollout.a=1"], "trainer.eval_only=true"),
    ],
)
def test_what_is_dropped_names_what_to_use_instead(words, instead):
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if "no longer in rl2" in line]
    assert instead in line


def test_a_dropped_option_of_one_command_is_no_answer_to_others():
    command = [sys.executable, "-m", "rl2.trainer.ppo", "--temperature=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "--temperature: unknown option" in done.stderr and "chat" not in done.stderr
