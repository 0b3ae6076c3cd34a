"""The documentation agrees with the code: commands, keys, files, links, defaults and metrics."""

import ast
import contextlib
import re
import shlex
import sys
from dataclasses import fields
from math import prod

import pytest
from common import ROOT

from rl2.config.key import schema_keys
from rl2.config.parse import parse
from rl2.config.schema import TRAINER_CONFIGS
from rl2.config.values import OPEN_KEYS
from rl2.worker import UpdateResult

sys.path.insert(0, str(ROOT / "docs"))
import generate  # noqa: E402

PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
SCRIPTS = ["examples/pipeline.sh", "examples/quickstart.sh"]  # test_recipes.py has the others
README_BUDGET = 7_000  # characters


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_readme_is_one_page():
    assert len(read("README.md")) <= README_BUDGET


@pytest.mark.parametrize("page", sorted([*PAGES, *SCRIPTS]))
def test_every_command_composes_and_is_valid(page, capsys, monkeypatch):
    """Each `-m rl2.trainer.X key=value` passes the checks of the config at its own world size.

    Files that only a user has may be missing, and so may keys of a line that has dots.
    """
    text = read(page).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if re.search(r"-m rl2\.trainer\.\w+[ `]", line)]
    assert lines or page != "README.md" and not page.startswith("examples/") or "install" in page
    for line in lines:
        launch, command = line.split("-m rl2.trainer.", maxsplit=1)
        trainer, _, rest = command.split("`")[0].strip().partition(" ")
        # ${NAME:-value} is its value, and $NAME its name.
        words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in shlex.split(rest, True)]
        words = [re.sub(r"\$\{?(\w+)\}?", r"\1", word) for word in words]
        overrides = [word for word in words if re.match(r"[\w.]+=.", word) and "..." not in word]
        launch = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", launch).replace('"', "")
        sizes = [int(n) for n in re.findall(r"--n(?:nodes|proc_per_node)=(\d+)", launch)]
        monkeypatch.setenv("WORLD_SIZE", str(prod(sizes)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(sizes[-1] if sizes else 1))
        monkeypatch.chdir(ROOT)
        with contextlib.suppress(SystemExit):
            parse(TRAINER_CONFIGS[trainer], overrides)
        errors = capsys.readouterr().err.splitlines()
        # A line without keys shows how to launch, and dots stand for keys that it leaves out.
        may_miss = "|is missing:" if "..." in words or not overrides else ""
        may_sweep = "|To sweep over it" if "--multirun" in words else ""
        allowed = "no such" + may_miss + may_sweep
        problems = [error for error in errors if error.startswith("  - ")]
        assert not [p for p in problems if not re.search(allowed, p)], f"{page}: {problems}"


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_is_named_exists(page):
    """A key is named in backticks, or as key=value. Keys of other projects have no backticks."""
    keys = {name for root in TRAINER_CONFIGS.values() for name in schema_keys(root)}
    sections = "|".join({key.split(".")[0] for key in keys})
    name = rf"(?<![\w./-])((?:{sections})\.[a-z_]+(?:\.[a-z_]+)*)"
    text = read(page)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    named = {key for span in spans for key in re.findall(name + r"(?![\w(/*])", span)}
    named |= set(re.findall(name + "=", text))
    for key in named:
        is_open = key.startswith(tuple(name + "." for name in OPEN_KEYS))
        is_file = re.search(r"\.(py|md|json|jsonl)$", key)
        assert key in keys or is_open or is_file, f"{page} names {key}, which is no key"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_file_that_is_named_exists(page):
    text = read(page)
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http:", "https:")):
            assert (folder / target).exists(), f"{page} links to {target}"
    folders = "rl2|envs|examples|benchmarks|tests|docs"
    for name in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/.-]*\w\.(?:py|sh|md|png))", text):
        assert (ROOT / name).exists(), f"{page} names {name}"


def test_every_extra_that_is_named_exists():
    extras = set(re.findall(r'^ {8}"(\w+)": \[', read("setup.py"), re.MULTILINE))
    assert {"sglang", "test"} <= extras
    for file in [*map(ROOT.joinpath, PAGES), *(ROOT / "rl2").rglob("*.py")]:
        for names in re.findall(r"(?:\brl2|'\.)\[([a-z0-9,-]+)\]", file.read_text("utf-8")):
            assert set(names.split(",")) <= extras, f"{file} names {names}"


def test_the_index_leads_to_every_page_and_the_readme_to_it():
    assert "docs/README.md" in read("README.md")
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert set(re.findall(r"\((\w+[.]md)\)", read("docs/README.md"))) == pages - {"README.md"}


@pytest.mark.parametrize("page", generate.PAGES)
def test_generated_pages_are_up_to_date(page):
    assert read(page) == generate.PAGES[page](), "run python docs/generate.py"


def string_constants(node) -> set[str]:
    constants = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def metrics_of_losses() -> set[str]:
    """The names of the metrics that the losses return, without the worker's name before them.

    They are the keys of the dicts in the functions of losses.py.
    """
    found = set()
    for function in ast.walk(ast.parse(read("rl2/algorithms/losses.py"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        prefix = "mismatch_" if function.name == "rollout_mismatch" else ""
        for node in ast.walk(function):
            keys = node.keys if isinstance(node, ast.Dict) else []
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                keys = [node.slice]
            found |= {f"{prefix}{key.value}" for key in keys if isinstance(key, ast.Constant)}
    return found - {"mismatch_ratio_squared"}  # it becomes the effective sample size


NO_METRICS = {"application/json", "chat/completions"}  # of HTTP


def metrics_of_code(trees: list[ast.AST]) -> set[str]:
    """The metrics that a simple reading of the code finds.

    These are strings with a slash, the names of phases, and what losses and updates return.
    """
    found = metrics_of_losses()
    for tree in trees:
        found |= {
            text for text in string_constants(tree) if re.fullmatch(r"[a-z]+/[a-z_]{2,}", text)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "phase":
                found |= {f"time/{text}" for text in string_constants(node)}
    found |= {field.name for field in fields(UpdateResult)} - {"metrics", "reported"}
    return found - NO_METRICS


def test_the_glossary_has_the_metrics_of_the_code():
    """docs/metrics.md has a row for each metric of the code, and no row for anything else.

    The metrics of a loss are compared without the name of the worker before them.
    """
    rows = re.findall(r"^\| (`[^|]+) \| ", read("docs/metrics.md"), re.M)
    explained = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    short = {name.rpartition("/")[2] for name in explained}
    trees = [ast.parse(path.read_text()) for path in (ROOT / "rl2").rglob("*.py")]
    metrics = metrics_of_code(trees)
    for metric in metrics:
        assert metric in (explained if "/" in metric else short), f"{metric} is not explained"
    known = metrics | {name.rpartition("/")[2] for name in metrics}
    known = known.union(*map(string_constants, trees))
    for metric in explained:
        name = re.sub("@.*", "@", metric.rpartition("/")[2])  # avg@N has the number of answers
        assert name.isupper() or metric in known or name in known, f"no code logs {metric}"
