"""The rules of the house that no tool checks: what an import loads, and that every key is read."""

import ast
import importlib
import re
import shutil
from dataclasses import fields, is_dataclass

from common import ROOT, run

PACKAGE = ROOT / "rl2"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

PAGE = ("page.html", "page.css", "page.js")


def test_no_line_escapes_the_formatter():
    for folder in ("rl2", "envs", "tests", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            assert "fmt: " + "skip" not in text and "fmt: " + "off" not in text, path


def is_within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


TRAINERS = [f"rl2.trainer.{name}" for name in ("ppo", "sft", "dpo", "rm")]
# Imports each module in a process of its own, which begins with what all of them load.
IMPORT_EACH = """
import os, sys
import rl2.worker

for name in sys.argv[1:]:
    if os.fork() == 0:
        __import__(name)
        sys.exit(print(name, *(module for module in sys.modules if module.startswith("rl2"))))
    if os.wait()[1] != 0:
        sys.exit(f"{name} cannot be imported")
"""


def test_trainers_load_no_tool_and_no_other_trainer():
    """SFT loads no environment, rollout or engine but for the defaults of sampling parameters."""
    for line in run("-c", IMPORT_EACH, *TRAINERS).stdout.splitlines():
        trainer, *loaded = line.split()
        assert not {module for module in loaded if is_within(module, "rl2.tools")}
        assert set(loaded) & set(TRAINERS) == {trainer}
        if trainer == "rl2.trainer.sft":
            rooms = ("rl2.env", "rl2.rollout", "rl2.engine")
            found = {module for module in loaded if any(is_within(module, room) for room in rooms)}
            assert found == {"rl2.engine", "rl2.engine.sampling_params"}


def test_envs_load_with_the_standard_library_and_the_rewards_alone():
    """Their own needs are imported by the functions that have them, and of rl2 only rl2.rewards: an
    env can be copied anywhere."""
    import sys

    def imported(node, inside=False):
        """(name, whether inside a function) of every import below `node`."""
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "rl2"] if isinstance(node, ast.ImportFrom) else []
        yield from [(name, inside) for name in names]
        for child in ast.iter_child_nodes(node):
            yield from imported(child, inside)

    for path in (ROOT / "envs").glob("*.py"):
        for name, inside in imported(ast.parse(path.read_text())):
            package = name.split(".")[0]
            if package == "rl2":
                assert is_within(name, "rl2.rewards"), f"{path} imports {name}"
            else:
                assert inside or package in sys.stdlib_module_names, f"{path} imports {name}"


def test_no_env_hides_a_module_of_the_standard_library():
    """`python envs/NAME.py` puts the folder in front of the standard library."""
    import sys

    names = {path.stem for path in (ROOT / "envs").glob("*.py")}
    assert not names & sys.stdlib_module_names


def test_every_module_imports_without_a_gpu():
    modules = [
        "rl2." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for file in FILES
    ]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "assert 'sglang' not in sys.modules"
    )
    run("-c", code, *modules, env={"CUDA_VISIBLE_DEVICES": ""})


def keys(section, prefix=""):
    for field in fields(section):
        value = getattr(section, field.name)
        yield from (
            keys(value, prefix + field.name + ".")
            if is_dataclass(value)
            else [(prefix + field.name, field.name)]
        )


def test_every_config_key_is_read():
    """By an attribute of its name outside config/; a key that only its check reads would change
    nothing."""
    config = importlib.import_module("rl2.config.schema")
    source = "\n".join(
        (PACKAGE / file).read_text() for file in FILES if not file.startswith("config/")
    )
    roots = [config.PPOConfig, config.SFTConfig, config.DPOConfig, config.RMConfig]
    for key, name in [item for root in roots for item in keys(root())]:
        pattern = rf"[.]{name}\b|[\"']{name}[\"']|getattr\([\w.]+, f?[\"'].*{name.split('_')[0]}_"
        assert re.search(pattern, source), f"no code reads {key}"


def test_the_wheel_carries_the_ready_made_envs(tmp_path):
    """Built and installed without the network, it finds them from any folder."""
    source = tmp_path / "source"
    for name in ("rl2", "envs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(*"-m pip wheel -q --no-build-isolation --no-deps -w".split(), tmp_path, source)
    [wheel] = tmp_path.glob("rl2-*.whl")
    target = tmp_path / "target"
    run(*"-m pip install -q --no-deps --no-index --target".split(), target, wheel)
    code = (
        "import rl2; from rl2.user_files import find_env_file; "
        "print(rl2.__version__, rl2.__file__, find_env_file('gsm8k'), sep='\\n')"
    )
    found = run("-c", code, env={"PYTHONPATH": str(target)}, cwd=tmp_path).stdout.split()
    assert found == [
        wheel.name.split("-")[1],
        str(target / "rl2/__init__.py"),
        str(target / "rl2/ready_envs/gsm8k.py"),
    ]
    carried = {path.name for path in (target / "rl2/ready_envs").glob("*.py")}
    assert carried == {path.name for path in (ROOT / "envs").glob("*.py")}
    assert (target / "rl2/py.typed").exists() and (target / "bin/rl2").exists()
    done = run("-m", "rl2", "report", tmp_path, env={"PYTHONPATH": str(target)}, check=False)
    assert "neither config.yaml" in done.stderr
    for part in PAGE:
        assert (target / "rl2/report" / part).exists()
    assert (target / "rl2/config/synonyms.yaml").exists()
    assert (target / "rl2/config/presets.yaml").exists()
    run("-m", "rl2", "new", "task", env={"PYTHONPATH": str(target)}, cwd=tmp_path)
    made = {path.name for path in (tmp_path / "task").iterdir()}
    assert made == {"env.py", "train.jsonl", "test.jsonl", "run.sh"}
