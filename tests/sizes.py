"""Prints the tokens of code of each room of the package, for information: nothing has to fit.

python tests/sizes.py            # also the change since the branch left origin/main
python tests/sizes.py REVISION   # the change since the branch left REVISION

On origin/main itself there is nothing to compare with, so the change is that of the last day: since
the newest commit of its first-parent history that is at least 24 hours older than HEAD.

Tokens leave out comments, docstrings and layout, so long lines and good comments cost nothing.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_tokens(source: str) -> int:
    """Returns the number of tokens of code in `source`."""
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docstring_lines.update(range(node.lineno, node.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(t.type not in LAYOUT and t.start[0] not in docstring_lines for t in tokens)


def room_of(path: str) -> str:
    """Returns the folder below rl2/ that holds `path`, or rl2 for the modules at the top."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else "rl2"


def sizes_now() -> Counter[str]:
    sizes: Counter[str] = Counter()
    for path in (ROOT / "rl2").rglob("*.py"):
        sizes[room_of(path.relative_to(ROOT).as_posix())] += count_tokens(path.read_text())
    return sizes


def git(*arguments: str) -> str:
    """Returns what git prints. CalledProcessError without a repository or the revision."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def sizes_at(revision: str) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for path in git("ls-tree", "-r", "--name-only", revision, "rl2").splitlines():
        if path.endswith(".py"):
            sizes[room_of(path)] += count_tokens(git("show", f"{revision}:{path}"))
    return sizes


def find_base() -> str:
    """The commit to compare with where none is named, see the top of the file."""
    head = git("rev-parse", "HEAD").strip()
    base = git("merge-base", "origin/main", head).strip()
    if base != head:
        return base
    day_before = int(git("show", "-s", "--format=%ct", head)) - 24 * 3600
    before = f"--before={day_before}"
    return git("rev-list", "--first-parent", "-n1", before, head).strip()


def main() -> None:
    now = sizes_now()
    before = None
    title = "tokens of code"
    try:
        base = git("merge-base", sys.argv[1], "HEAD").strip() if sys.argv[1:] else find_base()
        if base:
            before = sizes_at(base)
            title += git("show", "-s", "--format=, and the change since %h of %cs", base).strip()
    except (OSError, subprocess.CalledProcessError):
        pass  # no git, or no such revision: there is nothing to compare with
    print(title)
    for room in sorted(now | (before or Counter()), key=lambda room: -now[room]):
        change = f"{now[room] - before[room]:+8,}" if before else ""
        print(f"{now[room]:9,} {change}  {room}")
    total = f"{now.total() - before.total():+8,}" if before else ""
    print(f"{now.total():9,} {total}  in all")


if __name__ == "__main__":
    main()
