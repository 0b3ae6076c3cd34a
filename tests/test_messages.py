"""The text of every message about the config, in one file: tests/messages.txt.

A line that begins with "$ " is a command, and below it is what the command prints. $BASE stands for
the required keys. To add a message, add a command; to write what all commands print now:

    python tests/test_messages.py

Read the diff before you commit it. Other tests compare keys and values of problems, no sentences.
"""

import contextlib
import io
import os
import shlex
import tempfile
from pathlib import Path

from configs import BASE, ROOTS, write_files

from rl2.config.parse import parse

MESSAGES = Path(__file__).with_name("messages.txt")
ENVIRONMENT = {"WORLD_SIZE": "4", "RANK": "0"}


def run(command: str) -> str:
    """What a command prints, in a folder that has FILES of configs.py."""
    trainer, *words = shlex.split(command)
    if words and words[0] == "$BASE":
        words[:1] = BASE[trainer]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        with contextlib.suppress(SystemExit):
            parse(ROOTS[trainer], words)
    return output.getvalue()


def write_messages() -> str:
    """messages.txt as the commands in it print it now."""
    here = Path.cwd()
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            write_files(Path(folder))
            for line in MESSAGES.read_text(encoding="utf-8").splitlines():
                if line.startswith("$ "):
                    parts.append(f"{line}\n{run(line[2:])}")
        finally:
            os.chdir(here)
    return "\n".join(parts)


def test_messages(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert write_messages() == MESSAGES.read_text(encoding="utf-8"), (
        "if the change is meant: python tests/test_messages.py"
    )


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    MESSAGES.write_text(write_messages(), encoding="utf-8")
