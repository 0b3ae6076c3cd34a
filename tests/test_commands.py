"""The command line around the commands: `rl2 COMMAND` and --help."""

import re
import subprocess
import sys

import pytest

from rl2.__main__ import COMMANDS
from rl2.config.schema import TRAINER_CONFIGS

HEAVY = {"torch", "transformers"}  # they take seconds to import


@pytest.mark.parametrize(
    "arguments",
    [["-m", "rl2", name, "--help"] for name in COMMANDS]
    + [["-m", f"rl2.trainer.{name}", "--help"] for name in TRAINER_CONFIGS]
    + [["-m", "rl2.trainer.ppo", "--help", "rollout"], ["-m", "rl2"], ["-m", "rl2", "--version"]],
    ids=" ".join,
)
def test_help_comes_before_heavy_imports(arguments):
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    imported = set(re.findall(r"^import time:.*\| +(\w+)", done.stderr, re.MULTILINE))
    assert done.returncode == 0 and done.stdout
    assert "rl2" in imported and not imported & HEAVY


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["rl2", "push", "runs/x"], "hf upload"),
        (["rl2", "env", "gsm8k", "data.path=x", "--attack"], "weight 0"),
        (["rl2", "env", "gsm8k", "actor.model_name=x"], "trainer.eval_only=true"),
    ],
)
def test_what_is_dropped_names_what_to_use_instead(words, instead):
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if "no longer in rl2" in line]
    assert instead in line
