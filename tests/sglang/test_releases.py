"""Checks that every supported line of releases of SGLang knows the words of engine/sglang.py: what
it imports and calls, and the names of arguments, of fields and of parts of an answer.

The test reads the sources of both sides, because the environments of all releases cannot be
installed. test_sglang.py runs the newest one.
"""

import ast
import dataclasses
import re
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


@pytest.fixture(scope="module", params=RELEASES)
def texts(request):
    """The sources of one release by the names of their files."""
    number = version("sglang") if request.param == "installed" else request.param
    folder = Path(sys.prefix, "releases", number)
    if not list(folder.glob("*.whl")):
        options = f"-q --no-deps --only-binary=:all: -d {folder}".split()
        options += ["--python-version=3.12", "--platform=manylinux_2_34_x86_64"]
        pip = [sys.executable, "-m", "pip", "download", *options]
        subprocess.run([*pip, f"sglang=={number}"], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".py")]
        return {name: wheel.read(name).decode() for name in names}


def function(name: str) -> ast.AST:
    return next(node for node in ast.walk(OURS) if getattr(node, "name", None) == name)


def keys(node: ast.AST) -> set[str]:
    """The constant keys of all dicts inside `node`."""
    dicts = [inner for inner in ast.walk(node) if isinstance(inner, ast.Dict)]
    return {key.value for d in dicts for key in d.keys if isinstance(key, ast.Constant)}


def subscripts(node: ast.AST) -> set[str]:
    """The constant texts in brackets inside `node`."""
    slices = [inner.slice for inner in ast.walk(node) if isinstance(inner, ast.Subscript)]
    constants = [each.value for each in slices if isinstance(each, ast.Constant)]
    return {value for value in constants if isinstance(value, str)}


def calls(is_meant) -> set[str]:
    """The names of the functions, and of their keywords, of calls whose function is meant."""
    words = set()
    for node in ast.walk(OURS):
        if isinstance(node, ast.Call) and is_meant(node.func):
            words.add(getattr(node.func, "attr", None) or node.func.id)
            words |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return words


def calls_on(name: str) -> set[str]:
    """The same of x.name.METHOD(...) and of name.METHOD(...)."""

    def is_meant(function):
        owner = getattr(function, "value", None)
        return name in (getattr(owner, "attr", None), getattr(owner, "id", None))

    return calls(is_meant)


ASSIGNMENTS = {node.targets[0].id: node for node in OURS.body if isinstance(node, ast.Assign)}
# What the words are of -> (where SGLang has them, some of the words, all of them).
USES = {
    "the server": (
        ("server_args.py", "arg_groups/fields/"),
        {"custom_sigquit_handler", "attention_backend", "enable_memory_saver"},
        keys(ASSIGNMENTS["CPU_ARGUMENTS"]) | keys(function("_server_arguments")),
    ),
    "the engine": (
        ("entrypoints/engine.py", "entrypoints/EngineBase.py"),
        {"async_generate", "return_logprob", "shutdown", "tokenizer_manager", "loop"},
        calls_on("engine") | {"shutdown", "tokenizer_manager", "loop"},
    ),
    "its manager": (
        ("managers/tokenizer_manager.py", "managers/tokenizer_control_mixin.py"),
        {"update_weights_from_tensor", "abort_all"},
        calls_on("manager"),
    ),
    "requests": (
        ("managers/io_struct.py",),
        {"UpdateWeightsFromTensorReqInput", "serialized_named_tensors", "action"},
        calls(lambda function: getattr(function, "id", "").endswith("ReqInput")),
    ),
    "sampling": (
        ("sampling/sampling_params.py",),
        {"sampling_seed", "ignore_eos", "stop_token_ids"},
        keys(function("generate")),
    ),
    "weights": (
        ("weight_sync/tensor_bucket.py",),
        {"named_tensors", "get_metadata"},
        calls_on("flat") | {"named_tensors"},
    ),
    "readers of weights": (
        ("model_executor/",),
        {"flattened_tensor", "metadata"},
        keys(function("_gather_handles")) | {"flattened_bucket"},
    ),
    "answers": (
        ("managers/", "utils/"),
        {"meta_info", "output_token_logprobs"},
        subscripts(function("generate")),
    ),
}
for node in ast.walk(OURS):
    if isinstance(node, ast.ImportFrom) and node.module.startswith("sglang.srt."):
        names = {alias.name for alias in node.names}
        path = node.module.removeprefix("sglang.srt.").replace(".", "/")
        USES[node.module] = ((path,), names, names)


@pytest.mark.parametrize("use", USES)
def test_a_release_knows_our_words(texts, use):
    files, some, words = USES[use]
    assert some <= words
    places = tuple(f"sglang/srt/{file}" for file in files)
    found = [text for name, text in texts.items() if name.startswith(places)]
    known = set(re.findall(r"\w+", "\n".join(found)))
    assert words - OPTIONAL <= known, f"{sorted(words - OPTIONAL - known)} of {use}"


def test_all_sampling_parameters_are_passed():
    """It does not know where a continued answer begins, nor does it tell what it drew from; experts
    are an option of the request.
    """
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    others = {"continued_tokens", "experts_from", "with_candidates"}
    assert ours - others <= keys(function("generate"))
