"""Prints how large and how dense the code is, for information: nothing has to fit.

python tests/sizes.py            # also the change since the branch left origin/main
python tests/sizes.py REVISION   # the change since the branch left REVISION

On origin/main itself there is nothing to compare with, so the change is that of the last day: since
the newest commit of its first-parent history that is at least 24 hours older than HEAD.

Tokens leave out comments, docstrings and layout, so long lines and good comments cost nothing.
Comprehensions, splats (`*x`, `**x` in calls, lists and assignments) and `Any` are counted per 1,000
lines: where they are frequent, code is dense.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
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
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Sources = dict[str, str]  # path below the root -> text


@dataclass
class Sizes:
    tokens: Counter[str] = field(default_factory=Counter)  # by room
    figures: dict[str, float] = field(default_factory=dict)  # by what they are


def count_tokens(source: str) -> int:
    """Returns the number of tokens of code in `source`."""
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docstring_lines.update(range(node.lineno, node.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(t.type not in LAYOUT and t.start[0] not in docstring_lines for t in tokens)


def count_dense(source: str) -> Counter[str]:
    """Returns the numbers of comprehensions, splats and uses of `Any` in `source`."""
    counts: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, COMPREHENSIONS):
            counts["comprehensions"] += 1
        elif isinstance(node, ast.Starred):
            counts["splats"] += 1
        elif isinstance(node, ast.keyword):
            counts["splats"] += node.arg is None
        elif isinstance(node, ast.Dict):
            counts["splats"] += node.keys.count(None)
        elif isinstance(node, ast.Name):
            counts["Any"] += node.id == "Any"
    return counts


def room_of(path: str) -> str:
    """Returns the folder below rl2/ that holds `path`, or rl2 for the modules at the top."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else "rl2"


def modules_behind(path: str, sources: Sources) -> set[str]:
    """Returns the files of rl2 that importing the module `path` loads, itself included."""
    found: set[str] = set()
    waiting = [path]
    while waiting:
        path = waiting.pop()
        if path in found or path not in sources:
            continue
        found.add(path)
        for node in ast.parse(sources[path]).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names.append(node.module or "")
            for name in names:
                waiting.append(name.replace(".", "/") + ".py")
    return found


def measure(sources: Sources) -> Sizes:
    """Measures the files of rl2, tests and docs."""
    sizes = Sizes()
    dense: Counter[str] = Counter()
    num_lines: Counter[str] = Counter()
    for path, text in sources.items():
        folder = path.split("/")[0]
        if path.endswith(".py"):
            num_lines[folder] += text.count("\n")
        if folder == "rl2":
            sizes.tokens[room_of(path)] += count_tokens(text)
            dense += count_dense(text)
    for name in ("comprehensions", "splats", "Any"):
        sizes.figures[f"{name} per 1,000 lines"] = 1000 * dense[name] / num_lines["rl2"]
    behind = modules_behind("rl2/trainer/sft.py", sources)
    sizes.figures["modules behind rl2.trainer.sft"] = len(behind)
    sizes.figures["tokens behind rl2.trainer.sft"] = sum(count_tokens(sources[p]) for p in behind)
    sizes.figures["lines of Python in tests/"] = num_lines["tests"]
    docs = [text for path, text in sources.items() if path.endswith(".md")]
    sizes.figures["kB of docs/"] = sum(len(text.encode()) for text in docs) / 1000
    return sizes


def is_measured(path: str) -> bool:
    is_python = path.startswith(("rl2/", "tests/")) and path.endswith(".py")
    return is_python or (path.startswith("docs/") and path.endswith(".md"))


def sources_now() -> Sources:
    paths = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("[rtd]*/**/*.*")]
    return {path: (ROOT / path).read_text() for path in sorted(paths) if is_measured(path)}


def git(*arguments: str) -> str:
    """Returns what git prints. CalledProcessError without a repository or the revision."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def sources_at(revision: str) -> Sources:
    paths = git("ls-tree", "-r", "--name-only", revision).splitlines()
    return {path: git("show", f"{revision}:{path}") for path in paths if is_measured(path)}


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
    now = measure(sources_now())
    before = None
    title = "tokens of code"
    try:
        base = git("merge-base", sys.argv[1], "HEAD").strip() if sys.argv[1:] else find_base()
        if base:
            before = measure(sources_at(base))
            title += git("show", "-s", "--format=, and the change since %h of %cs", base).strip()
    except (OSError, subprocess.CalledProcessError):
        pass  # no git, or no such revision: there is nothing to compare with
    print(title)
    rooms = now.tokens | (before.tokens if before else Counter())
    for room in sorted(rooms, key=lambda room: -now.tokens[room]):
        change = f"{now.tokens[room] - before.tokens[room]:+8,}" if before else ""
        print(f"{now.tokens[room]:9,} {change}  {room}")
    total = f"{now.tokens.total() - before.tokens.total():+8,}" if before else ""
    print(f"{now.tokens.total():9,} {total}  in all")
    for name, figure in now.figures.items():
        change = f"{figure - before.figures[name]:+8,.0f}" if before else ""
        print(f"{figure:9,.0f} {change}  {name}")


if __name__ == "__main__":
    main()
