"""A folder with files in which commands run one after another, for agents that edit and run code.

    with Workspace({"add.py": "def add(a, b): return a - b"}) as workspace:
        workspace.run("sed -i 's/a - b/a + b/' add.py").status  # "succeeded"
        workspace.run("python -c 'from add import add; print(add(1, 2))'").stdout  # "3\\n"
        workspace.read("add.py")

Each command runs in a sandbox with the limits and strengths of rl2/rewards/sandbox.py, and what it
has started ends with it. Files stay until the workspace is closed. With the strength namespaces
they are in memory; a command then sees /usr, Python and the trainer's packages besides.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from rl2.rewards.sandbox import Files, Limits, Result, Sandbox, free_core

SHELL = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'


class Workspace(Sandbox):
    """Runs commands in a folder of its own. Its methods may be called from any thread.

    `files`, `limits` and errors are those of Sandbox.
    """

    def __init__(
        self,
        files: Files | str | Path | None = None,
        limits: Limits | None = None,
        strength: str = "",
    ) -> None:
        super().__init__(files or {}, limits, strength)
        self._lock = threading.Lock()

    def run(self, command: str | Sequence[str], stdin: bytes = b"") -> Result:
        """Runs a line of the shell, or a program with its arguments, and waits for its end.

        The call waits for a free core. OSError if the workspace has been closed, or if it has
        ended, as it may where the machine runs out of memory.
        """
        words = [SHELL, "-c", command] if isinstance(command, str) else command
        with self._lock, free_core():
            self.start(words, stdin)
            return self.wait()

    def read(self, path: str) -> str:
        """Returns the text of a file. FileNotFoundError if it cannot be read."""
        result = self.run(["cat", "--", path])
        if result.status != "succeeded":
            raise FileNotFoundError(result.stderr.strip() or f"{path}: {result.status}")
        return result.stdout

    def write(self, path: str, content: str | bytes) -> None:
        """Writes a file, and makes its folders. OSError if that is not possible."""
        data = content.encode() if isinstance(content, str) else content
        result = self.run(["/bin/sh", "-c", WRITE, "sh", path], stdin=data)
        if result.status != "succeeded":
            raise OSError(result.stderr.strip() or f"{path}: {result.status}")


def shorten(text: str, max_characters: int) -> str:
    """Leaves out the middle of a longer text, such as what a command prints."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n...\n{text[-half:]}"
