"""The house rules: line budgets, who imports whom, no GPU at import, every config key read, every command composes."""

import ast
import importlib
import io
import re
import shlex
import tokenize
from dataclasses import fields, is_dataclass
from math import prod
from pathlib import Path

import pytest
from common import ROOT, run

PACKAGE = ROOT / "rl2"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
CORE = {"trainer/ppo.py", "trainer/sft.py", "trainer/dpo.py", "trainer/rm.py", "algorithms.py", "batch.py", "model.py"}
CORE |= {"trainer/run.py", "worker.py", "rollout/rollout.py"}
CAPPED = {f"parallel/{name}.py" for name in ("attention", "fsdp", "head", "lora", "mesh", "ring", "tensor")}
CAPPED |= {f"rollout/{name}.py" for name in ("engine", "engine_local", "engine_sglang", "sampling")}
ALLOWED = {  # module -> the modules of rl2 it may import
    "algorithms": set(), "batch": set(), "chat": set(), "parallel.mesh": set(), "rollout.env": set(),
    "parallel.attention": {"parallel.mesh", "parallel.ring"}, "parallel.ring": {"parallel.mesh", "parallel.attention"},
    "parallel.fsdp": {"parallel.mesh"}, "parallel.head": {"parallel.tensor"}, "parallel.tensor": {"parallel.mesh"},
    "parallel.lora": set(),
    "model": {"parallel"}, "worker": {"model", "batch", "parallel"}, "rollout.sampling": set(),
    "rollout.engine_local": {"parallel", "rollout.sampling"}, "rollout.engine": {"rollout"},
    "rollout.engine_sglang": {"parallel", "rollout.sampling"},
    "rollout.rollout": {"batch", "chat", "rollout.env", "parallel.mesh"},
    "data": {"batch", "chat"}, "checkpoint": {"parallel.mesh"}, "metrics": {"parallel.mesh"},
}  # fmt: skip


def code_lines(path: Path) -> int:
    """Lines that hold code: no blanks, comments or docstrings."""
    source = path.read_text()
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def test_line_budgets(capsys):
    counts = {file: code_lines(PACKAGE / file) for file in FILES}
    core = sum(n for file, n in counts.items() if file in CORE)
    capped = {file: n for file, n in counts.items() if file in CAPPED}
    rest = sum(n for file, n in counts.items() if file not in CORE | CAPPED)
    with capsys.disabled():
        told = ", ".join(f"{file} {n}" for file, n in sorted(counts.items(), key=lambda item: -item[1]) if n)
        print(f"\ncode lines: core {core} of 1300, the rest {rest} of 1300; {told}")
    assert core <= 1300
    assert rest <= 1300
    assert all(n <= 300 for n in capped.values()), capped


def test_no_function_is_longer_than_a_page():
    for file in FILES:
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{file}: {node.name}"


def imports(file: str) -> set[str]:
    """The modules of rl2 that a file imports, as dotted paths below rl2."""
    package = ["rl2", *Path(file).parent.parts]
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                name = ".".join([*base, alias.name])
                is_module = (ROOT / (name.replace(".", "/") + ".py")).exists()
                found.add(name if is_module else ".".join(base))
    return {name.removeprefix("rl2.") for name in found if name.startswith("rl2.")}


def test_who_imports_whom():
    for file in FILES:
        module = file.removesuffix(".py").replace("/", ".")
        if module in ALLOWED:
            bad = {i for i in imports(file) if not any(i == a or i.startswith(a + ".") for a in ALLOWED[module])}
            assert not bad, f"{module} may not import {sorted(bad)}"
        elif module.startswith("trainer."):
            mains = {"trainer.ppo", "trainer.sft", "trainer.dpo", "trainer.rm"}
            assert not imports(file) & mains, f"{module} imports another main"
        else:
            assert Path(file).name == "__init__.py", f"{module} is not in the import table"
    outside = {"sglang": {"rollout/engine_sglang.py"}, "flash_attn": {"parallel/attention.py"}}
    outside |= {"peft": {"parallel/lora.py"}}
    for file in FILES:
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in names:
                assert file in outside.get(name.split(".")[0], {file}), f"{file} imports {name}"


def test_envs_load_with_the_standard_library_alone():
    """Their own needs are imported by the functions that have them, and rl2 nowhere: an env can be copied anywhere."""
    import sys

    def imported(node, inside=False):
        """(name, whether inside a function) of every import below `node`."""
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "rl2"] if isinstance(node, ast.ImportFrom) else []
        yield from [(name.split(".")[0], inside) for name in names]
        for child in ast.iter_child_nodes(node):
            yield from imported(child, inside)

    for path in (ROOT / "envs").glob("*.py"):
        for name, inside in imported(ast.parse(path.read_text())):
            assert name != "rl2" and (inside or name in sys.stdlib_module_names), f"{path} imports {name}"


def test_every_module_imports_without_a_gpu():
    modules = ["rl2." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in FILES]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nassert 'sglang' not in sys.modules"
    run("-c", code, *modules, env={"CUDA_VISIBLE_DEVICES": ""})


def keys(section, prefix=""):
    for field in fields(section):
        value = getattr(section, field.name)
        yield from (
            keys(value, prefix + field.name + ".") if is_dataclass(value) else [(prefix + field.name, field.name)]
        )


def test_every_config_key_is_read():
    """By an attribute of its name outside config.py; a key that only its check reads would change nothing."""
    config = importlib.import_module("rl2.trainer.config")
    source = "\n".join((PACKAGE / file).read_text() for file in FILES if file != "trainer/config.py")
    roots = [config.PPOConfig, config.SFTConfig, config.DPOConfig, config.RMConfig]
    for key, name in [item for root in roots for item in keys(root())]:
        pattern = rf"[.]{name}\b|[\"']{name}[\"']|getattr\([\w.]+, f?[\"'].*{name.split('_')[0]}_"
        assert re.search(pattern, source), f"no code reads {key}"


@pytest.mark.parametrize(
    "path", ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("examples/*.sh"))]
)
def test_every_command_composes_and_is_valid(path, capsys, monkeypatch):
    """Each `-m rl2.trainer.X key=value` of the README and the examples passes the checks of its own world size, up to files
    that only a user has and to keys that a line leaves out by its dots."""
    config = importlib.import_module("rl2.trainer.config")
    text = (ROOT / path).read_text().replace("\\\n", " ")
    lines = [line.split("-m rl2.trainer.") for line in text.splitlines() if "-m rl2.trainer." in line]
    assert lines or path == "examples/install.sh"
    for launch, command in lines:
        trainer, _, rest = command.strip().strip("`").partition(" ")
        # ${NAME:-value} is its value, and $NAME its name.
        words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in shlex.split(rest, comments=True)]
        words = [re.sub(r"\$\{?(\w+)\}?", r"\1", word) for word in words]
        overrides = [word for word in words if re.match(r"[\w.]+=.", word) and "..." not in word]
        launch = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", launch).replace('"', "")
        sizes = [int(n) for n in re.findall(r"--n(?:nodes|proc_per_node)=(\d+)", launch)]
        monkeypatch.setenv("WORLD_SIZE", str(prod(sizes)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(sizes[-1] if sizes else 1))
        root, validate = getattr(config, f"{trainer.upper()}Config"), getattr(config, f"validate_{trainer}")
        monkeypatch.chdir(ROOT)
        try:
            config.parse(root, overrides, validate)
        except SystemExit:
            pass
        told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  - ")]
        allowed = "no such|this folder holds no model" + ("|is missing:" if "..." in words else "")
        assert not [line for line in told if not re.search(allowed, line)], f"{path}: {told}"
