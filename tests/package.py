"""A part of package.sh: compares the installed rl2 with the checkout, and makes what it trains on.

    python package.py CHECKOUT

Files that git tracks must be installed. The current folder gets rows and a tiny random model.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from common import make_model

import rl2

INSTALLED = {"rl2": "", "envs": "ready_envs"}  # folder of the checkout -> folder of the package


def main() -> None:
    root = Path(sys.argv[1])
    package = Path(rl2.__file__).parent
    assert package.is_relative_to(sys.prefix), f"{package} is not the installed rl2"
    for folder, place in INSTALLED.items():
        command = ["git", "-C", str(root), "ls-files", folder]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        paths = [Path(line).relative_to(folder) for line in listed.splitlines()]
        missing = [str(path) for path in paths if not (package / place / path).is_file()]
        assert paths and not missing, f"not in the wheel: {', '.join(missing)}"
    shutil.copy(root / "examples/rows/arithmetic.jsonl", "rows.jsonl")
    talk = [{"role": "user", "content": "say a"}, {"role": "assistant", "content": "a"}]
    Path("talks.jsonl").write_text(2 * (json.dumps({"messages": talk}) + "\n"))
    make_model("tiny")


if __name__ == "__main__":
    main()
