"""The house rules: who imports whom, no GPU at import, every config key is read."""

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


# Who may import whom: module or room -> the modules and rooms of rl2 that it may import.
# A module has the rule of its longest prefix here.
ALLOWED = {
    "algorithms": {"algorithms"},
    "batch": set(),
    "packing": {"batch"},
    "config": {
        "config",
        "algorithms",
        "engine.select",
        "engine.base",
        "engine.toolkit",
        "env.contract",
        "error_report",
        "parallel.mesh",
        "parallel.pages",
    },
    "parallel.device": set(),
    "parallel.offload": set(),
    "parallel.mesh": set(),
    "parallel.planned_device": set(),
    "parallel.tensor": {"parallel.mesh"},
    "parallel.fsdp": {"parallel.mesh", "parallel.ring"},  # a layer that runs again keeps attention
    "parallel.attention": {"parallel.device", "parallel.mesh"},  # rank 0 tells the choice
    "parallel.blocks": {"parallel.attention", "parallel.device", "parallel.pages"},
    "parallel.pages": set(),
    "parallel.ring": {
        "parallel.mesh",
        "parallel.attention",
        "parallel.blocks",
        "parallel.pages",
    },
    "model": {"batch", "model", "parallel"},
    "model.admission": {"batch", "packing", "model", "parallel"},
    "optimizer": {"parallel"},
    "worker": {
        "batch",
        "packing",
        "model",
        "optimizer",
        "parallel",
        "checkpoints",
        "config.schema",
        "error_report",
    },
    "engine.base": set(),
    "engine.select": {"engine.base"},
    "engine.toolkit": set(),
    "engine.sampler": {"model.head"},  # both sides have one softmax
    "engine": {"engine", "parallel"},
    "engine.local": {"engine", "parallel", "model.head"},
    "env.contract": set(),
    "env": {"env"},
    "env.load": {"env", "data.rows"},
    "data": {"data", "batch", "parallel.mesh"},
    "inputs": {
        "config.conditions",
        "config.schema",
        "data",
        "env",
        "model.folder",
        "parallel.mesh",
    },
    # An evaluation is a run of its own too, with a folder and a log.
    "evaluate": {
        "data.examples",
        "engine.base",
        "env.contract",
        "parallel.mesh",
        "report",
        "rollout",
        "run_folder",
    },
    "rollout": {
        "rollout",
        "algorithms",
        "batch",
        "data",
        "engine.base",
        "env",
        "parallel.mesh",
        "rewards.text",
    },
    "run_lock": set(),
    "weights_hash": {"parallel"},
    "disk_space": set(),
    "records": {"error_report"},
    "checkpoints": {"parallel.mesh", "error_report", "weights_hash"},
    # It compares configs, and the files that they name.
    "run_folder": {
        "checkpoints",
        "run_lock",
        "config",
        "data.rows",
        "parallel.mesh",
        "error_report",
        "records",
        "weights_hash",
    },
    "memory_plan": {"parallel.mesh"},  # rank 0 tells all ranks
    # A plan runs the trainers' own workers and losses.
    "commands": {
        "batch",
        "commands.compare",
        "config",
        "engine.share",
        "memory_plan",
        "parallel",
        "report",
        "trainer",
        "worker",
    },
    "commands.plan": {
        "batch",
        "config",
        "engine.share",
        "memory_plan",
        "model.folder",
        "parallel",
        "signals",
        "trainer",
        "worker",
    },
    # It does what a rollout does with an environment, and runs one with a model.
    "commands.env": {"config", "data", "env", "trainer"},
    "commands.replay": {"checkpoints", "commands.compare", "commands.diff", "report"},
    # It is a main of all trainers.
    "commands.rerun": {"config", "data", "inputs", "rollout", "signals", "trainer"},
    # They compare rl2 with transformers, part by part.
    "commands.prove": {"commands", "config", "data", "inputs", "model"},
    "commands.proofs": {
        "algorithms",
        "batch",
        "config",
        "data",
        "model",
        "trainer",
        "worker",
    },
    "commands.outer_proofs": {
        "algorithms",
        "batch",
        "commands",
        "config",
        "data",
        "engine",
        "model",
        "packing",
        "parallel",
        "trainer",
    },
    "rewards": {"rewards"},  # for env files
    "error_report": set(),
    "progress": set(),
    "watchdog": set(),
    "signals": {"parallel.mesh", "error_report", "watchdog"},
    # It logs the plan of the memory beside its peak.
    "report": {"report", "error_report", "records", "checkpoints", "memory_plan", "weights_hash"},
}
MAINS = {"trainer.ppo", "trainer.sft", "trainer.dpo", "trainer.rm"}
OUTSIDE = {  # packages that only these files import
    "sglang": {"engine/sglang.py"},
    "peft": {"model/lora.py"},
    "h11": {"rollout/http.py"},
    "math_verify": {"rewards/maths.py"},
    "latex2sympy2_extended": {"rewards/maths.py"},
}


EVERYWHERE = {"progress"}  # it counts, and imports nothing of rl2


def imports(file: str) -> set[str]:
    """The modules of rl2 that a file imports, as dotted paths below rl2."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: imports are absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = (ROOT / (name.replace(".", "/") + ".py")).exists()
                found.add(name if is_module else node.module)
    return {name.removeprefix("rl2.") for name in found if name.startswith("rl2.")}


def is_within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def test_who_imports_whom():
    for file in FILES:
        if file.endswith("__init__.py") or file == "__main__.py":
            assert not imports(file), file
            continue
        module = file.removesuffix(".py").replace("/", ".")
        if is_within(module, "trainer"):
            assert not imports(file) & MAINS, f"{module} imports another main"
            continue
        rules = [room for room in ALLOWED if is_within(module, room)]
        assert rules, f"{module} is not in the import table"
        allowed = ALLOWED[max(rules, key=len)] | EVERYWHERE
        wrong = {i for i in imports(file) if not any(is_within(i, room) for room in allowed)}
        assert not wrong, f"{module} may not import {sorted(wrong)}"


def test_packages_that_one_file_alone_imports():
    for file in FILES:
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert file in OUTSIDE.get(name.split(".")[0], {file}), f"{file} imports {name}"


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
        "import rl2; from rl2.env.contract import find_env_file; "
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
