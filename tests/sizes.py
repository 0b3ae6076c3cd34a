"""Prints how large and how dense the code is, for information: nothing has to fit.

    python tests/sizes.py

Lines of code leave out blank lines, comments and docstrings. Comprehensions, splats (`*x`, `**x` in
calls, lists and assignments) and `Any` are counted per 1,000 of them: where they are frequent, code
is dense.
"""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def count_lines(source: str) -> int:
    """Returns the number of lines of code in `source`."""
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docstring_lines.update(range(node.lineno, node.end_lineno + 1))
    count = 0
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        count += bool(text) and not text.startswith("#") and number not in docstring_lines
    return count


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


def main() -> None:
    rooms: Counter[str] = Counter()  # folder of rl2, or rl2 for the modules at the top -> lines
    dense: Counter[str] = Counter()
    for path in (ROOT / "rl2").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        folders = path.relative_to(ROOT).parts[:-1]
        rooms[folders[min(1, len(folders) - 1)]] += count_lines(source)
        dense += count_dense(source)
    for room, lines in rooms.most_common():
        print(f"{lines:9,}  {room}")
    print(f"{rooms.total():9,}  lines of code in all")
    for name, count in dense.items():
        print(f"{1000 * count / rooms.total():9,.0f}  {name} per 1,000 lines")
    tests = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    print(f"{sum(map(count_lines, tests)):9,}  lines of code in tests/")


if __name__ == "__main__":
    main()
