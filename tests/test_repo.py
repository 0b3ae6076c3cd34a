"""The rules of the house that no tool checks: what an import loads, and that every key is read."""

import ast
import re
import sys

from common import ROOT, run

from rl2.config.engines import RELEASES
from rl2.config.key import schema_keys
from rl2.config.schema import TRAINER_CONFIGS

PACKAGE = ROOT / "rl2"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def test_no_line_escapes_the_formatter():
    for folder in ("rl2", "envs", "tests", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            assert "fmt: " + "skip" not in text and "fmt: " + "off" not in text, path


def is_within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


TRAINERS = [f"rl2.trainer.{name}" for name in ("ppo", "sft", "dpo", "rm")]
# Imports each trainer in a process of its own, which begins with what all of them load, and then
# all modules that are named.
IMPORT_EACH = """
import importlib, os, sys
import rl2.worker

trainers, *names = sys.argv[1:]
for name in trainers.split():
    if os.fork() == 0:
        importlib.import_module(name)
        sys.exit(print(name, *(module for module in sys.modules if module.startswith("rl2"))))
    if os.wait()[1] != 0:
        sys.exit(f"{name} cannot be imported")
for name in names:
    importlib.import_module(name)
assert "sglang" not in sys.modules
"""


def test_every_module_imports_without_a_gpu_and_a_trainer_loads_no_other_and_no_tool():
    """SFT loads no environment, rollout or engine but for the defaults of sampling parameters."""
    modules = [file.removesuffix(".py").removesuffix("/__init__") for file in FILES]
    names = ["rl2." + module.replace("/", ".") for module in modules if module != "__init__"]
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    lines = run("-c", IMPORT_EACH, " ".join(TRAINERS), *names, env=no_gpu).stdout.splitlines()
    for trainer, line in zip(TRAINERS, lines, strict=True):
        name, *loaded = line.split()
        assert name == trainer and set(loaded) & set(TRAINERS) == {trainer}
        assert not {module for module in loaded if is_within(module, "rl2.tools")}
        if trainer == "rl2.trainer.sft":
            rooms = ("rl2.env", "rl2.rollout", "rl2.engine")
            found = {module for module in loaded if any(is_within(module, room) for room in rooms)}
            assert found == {"rl2.engine", "rl2.engine.sampling_params"}


def test_envs_load_with_the_standard_library_and_the_rewards_alone():
    """Their own needs are imported by the functions that have them, and of rl2 only rl2.rewards: an
    env can be copied anywhere."""

    def imported(node, inside=False):
        """(name, whether inside a function) of every import below `node`."""
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "rl2"] if isinstance(node, ast.ImportFrom) else []
        yield from [(name, inside) for name in names]
        for child in ast.iter_child_nodes(node):
            yield from imported(child, inside)

    for path in (ROOT / "envs").glob("*.py"):
        # `python envs/NAME.py` puts the folder in front of the standard library.
        assert path.stem not in sys.stdlib_module_names
        for name, inside in imported(ast.parse(path.read_text())):
            package = name.split(".")[0]
            if package == "rl2":
                assert is_within(name, "rl2.rewards"), f"{path} imports {name}"
            else:
                assert inside or package in sys.stdlib_module_names, f"{path} imports {name}"


def test_every_config_key_is_read():
    """By an attribute of its name outside config/; a key that only its check reads would change
    nothing."""
    source = "\n".join(
        (PACKAGE / file).read_text() for file in FILES if not file.startswith("config/")
    )
    for key in {key for root in TRAINER_CONFIGS.values() for key in schema_keys(root)}:
        name = key.rpartition(".")[2]
        pattern = rf"[.]{name}\b|[\"']{name}[\"']|getattr\([\w.]+, f?[\"'].*{name.split('_')[0]}_"
        assert re.search(pattern, source), f"no code reads {key}"


def test_an_engine_runs_with_the_releases_that_an_installation_gets():
    setup = (ROOT / "setup.py").read_text()
    for engine, releases in RELEASES.items():
        assert f'"{engine}": ["{engine}{releases}' in setup
