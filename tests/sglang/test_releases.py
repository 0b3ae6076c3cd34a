"""Checks that the functions that engine/sglang.py calls exist in every supported line of releases.

They must take the parameters that engine/sglang.py passes. The test reads the sources of both sides
as syntax trees, because the environments of all releases cannot be installed.
"""

import ast
import dataclasses
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import ROOT  # noqa: E402

from rl2.engine.base import SamplingParams  # noqa: E402

# The oldest, and one release before each change of the used functions: the server's arguments moved
# in 0.5.20, and sessions of weight updates came in 0.5.21. "installed" is the newest release.
RELEASES = ["0.5.17", "0.5.20", "installed"]
OPTIONAL = {"begin_weight_update", "end_weight_update"}  # checked with hasattr
OURS = ast.parse((ROOT / "rl2/engine/sglang.py").read_text())


class Release:
    """The sources of one release, as syntax trees."""

    def __init__(self, number: str):
        number = version("sglang") if number == "installed" else number
        folder = Path(sys.prefix, "releases", number)
        if not list(folder.glob("*.whl")):
            options = f"-q --no-deps --only-binary=:all: -d {folder}".split()
            options += ["--python-version=3.12", "--platform=manylinux_2_34_x86_64"]
            pip = [sys.executable, "-m", "pip", "download", *options]
            subprocess.run([*pip, f"sglang=={number}"], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".py")]
            self.texts = {name: wheel.read(name).decode() for name in names}

    def tree(self, module: str) -> ast.Module:
        name = module.replace(".", "/")
        return ast.parse(self.texts.get(f"{name}.py") or self.texts[f"{name}/__init__.py"])

    def names(self, module: str) -> set[str]:
        """Returns the names that a module defines or imports, including imports by *."""
        found = set()
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found |= (
                        self.names(node.module)
                        if alias.name == "*"
                        else {alias.asname or alias.name}
                    )
        return found

    def classes(self, *modules: str) -> dict[str, ast.ClassDef]:
        trees = [self.tree(module) for module in modules]
        return {
            node.name: node
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }


def fields(node: ast.ClassDef) -> set[str]:
    return {statement.target.id for statement in node.body if isinstance(statement, ast.AnnAssign)}


def methods(nodes) -> dict[str, ast.arguments]:
    """Returns name -> arguments of the methods of all classes. The last class wins."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {
        inner.name: inner.args for node in nodes for inner in node.body if isinstance(inner, kinds)
    }


def calls_on(name: str) -> list[ast.Call]:
    """Returns the calls of x.name.METHOD(...) and of name.METHOD(...) in engine/sglang.py."""
    found = []
    for node in ast.walk(OURS):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if name in (getattr(owner, "attr", None), getattr(owner, "id", None)):
                found.append(node)
    return found


def function(tree, name: str) -> ast.AST:
    return next(node for node in ast.walk(tree) if getattr(node, "name", None) == name)


def keys(node: ast.AST) -> set[str]:
    """Returns the constant keys of all dicts inside `node`."""
    dicts = [inner for inner in ast.walk(node) if isinstance(inner, ast.Dict)]
    return {key.value for d in dicts for key in d.keys if isinstance(key, ast.Constant)}


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    return Release(request.param)


def check_calls(calls: list[ast.Call], signatures: dict[str, ast.arguments]):
    """Checks that every call names a method in `signatures` and passes arguments that it takes."""
    assert calls
    for call in calls:
        name = call.func.attr
        if name in OPTIONAL and name not in signatures:
            continue
        assert name in signatures, f"there is no {name}"
        arguments = signatures[name]
        positional = [a.arg for a in arguments.args if a.arg not in ("self", "cls")]
        assert len(call.args) <= len(positional), f"{name} takes {positional}"
        known = {*positional, *(a.arg for a in arguments.kwonlyargs)}
        assert arguments.kwarg or {k.arg for k in call.keywords if k.arg} <= known, (
            f"{name} takes {sorted(known)}"
        )


def test_what_we_import_is_there(release):
    imports = [node for node in ast.walk(OURS) if isinstance(node, ast.ImportFrom)]
    imports = [node for node in imports if node.module.startswith("sglang.")]
    assert len(imports) >= 4
    for node in imports:
        assert {alias.name for alias in node.names} <= release.names(node.module), node.module


def test_the_arguments_of_the_server_are_there(release):
    modules = [
        name.removesuffix(".py").replace("/", ".")
        for name in release.texts
        if name == "sglang/srt/server_args.py" or name.startswith("sglang/srt/arg_groups/fields/")
    ]
    known = set().union(*(fields(node) for node in release.classes(*modules).values()))
    constants = [node for node in OURS.body if isinstance(node, ast.Assign)]
    for_cpu = next(node for node in constants if node.targets[0].id == "CPU_ARGUMENTS")
    ours = keys(for_cpu) | keys(function(OURS, "_server_arguments"))
    assert len(ours) > 15 and "custom_sigquit_handler" in ours
    assert ours <= known, f"ServerArgs has no {sorted(ours - known)}"


def test_the_methods_of_engine_and_manager_take_what_we_pass(release):
    classes = release.classes("sglang.srt.entrypoints.engine", "sglang.srt.entrypoints.EngineBase")
    engine = methods([classes["EngineBase"], classes["Engine"]])
    modules = ("tokenizer_manager", "tokenizer_control_mixin")
    manager = methods(
        release.classes(*(f"sglang.srt.managers.{name}" for name in modules)).values()
    )
    check_calls(calls_on("engine"), engine)
    check_calls(calls_on("manager"), manager)
    assert "shutdown" in engine
    text = release.texts["sglang/srt/entrypoints/engine.py"]
    for attribute in ("loop", "tokenizer_manager"):
        assert f"self.{attribute} = " in text or f"self.{attribute}: " in text, attribute


def test_the_requests_have_the_fields_we_set(release):
    classes = release.classes("sglang.srt.managers.io_struct")
    calls = [node for node in ast.walk(OURS) if isinstance(node, ast.Call)]
    requests = [call for call in calls if getattr(call.func, "id", "").endswith("ReqInput")]
    assert requests
    for call in requests:
        assert {k.arg for k in call.keywords} <= fields(classes[call.func.id]), call.func.id


def test_the_sampling_parameters_are_there(release):
    known = fields(release.classes("sglang.srt.sampling.sampling_params")["SamplingParams"])
    ours = keys(function(OURS, "generate"))
    wanted = {field.name for field in dataclasses.fields(SamplingParams)}
    # It does not know where a continued answer begins, nor does it tell what it drew from; experts
    # are an option of the request.
    assert wanted - {"continued_tokens", "experts_from", "with_candidates"} <= ours
    assert {"sampling_seed", "ignore_eos", "stop_token_ids"} <= ours
    assert ours <= known, f"SamplingParams has no {sorted(ours - known)}"


def test_the_weights_are_packed_as_it_unpacks_them(release):
    check_calls(
        calls_on("flat"),
        methods([release.classes("sglang.srt.weight_sync.tensor_bucket")["FlattenedTensorBucket"]]),
    )
    readers = [
        n
        for n in release.texts
        if n.startswith("sglang/srt/model_executor/") and "flattened_bucket" in release.texts[n]
    ]
    assert readers, "nobody reads load_format=flattened_bucket"
    for key in keys(function(OURS, "_gather_handles")):
        assert any(f'"{key}"' in release.texts[name] for name in readers), f"nobody reads {key}"


def test_what_is_read_of_an_answer_is_there(release):
    read = {
        node.slice.value
        for node in ast.walk(function(OURS, "generate"))
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    }
    assert {"meta_info", "output_token_logprobs"} <= read
    texts = [
        release.texts[name]
        for name in release.texts
        if name.startswith(("sglang/srt/managers/", "sglang/srt/utils/"))
    ]
    for key in read:
        assert any(f'"{key}"' in text or f"{key}=" in text for text in texts), (
            f"no answer has {key}"
        )
