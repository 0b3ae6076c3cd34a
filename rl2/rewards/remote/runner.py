"""The side of the tests: finds them as pytest and unittest do, and runs them.

`check` is the main function.
"""

import ast
import asyncio
import builtins
import functools
import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from rl2.rewards.remote.connection import connect
from rl2.rewards.remote.references import Remote, decode_object


def check(tests: str, token: str) -> NoReturn:
    """Runs the tests. When all have passed, writes the token, which they do not know."""
    Remote.results, Remote.calls = connect()
    program = decode_object(0, "")
    sys.modules["solution"] = program
    module = ModuleType("tests")
    sys.modules["tests"] = module
    scope = vars(module)
    tree = ast.parse(tests)
    names, Remote.judges = divide_names(tree)
    for name in names - Remote.judges:
        with suppress(AttributeError):
            scope[name] = getattr(program, name)
    if "unittest" in tests:
        unittest: Any = importlib.import_module("unittest")
        unittest.main = lambda *_, **__: None  # what it would run is collected below
    exec(compile(tree, "tests", "exec"), scope)
    collected = list(collect(scope))
    for test in collected:
        run_test(test)
    if not collected:
        for node in tree.body:
            if isinstance(node, ast.If) and is_main_guard(node):
                exec(compile(ast.Module(node.body, []), "tests", "exec"), scope)
    if not Remote.num_calls:
        sys.exit("the tests call nothing of the program")
    sys.stdout.flush()
    os.write(1, token.encode())
    os._exit(0)


def divide_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Returns the names in the tests, and all names that the program must not provide.

    Else it could provide what judges it, such as `math` in math.isclose(f(1), 0.5).
    """
    names: set[str] = set()
    called: set[str] = set()
    judges: set[str] = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if getattr(node, "module", "") != "solution":
                judges.update(alias.asname or alias.name for alias in node.names)
    # No module can be called: the tests that call bisect(x) mean a function of the program.
    return names, judges | (sys.stdlib_module_names - called)


def is_main_guard(node: ast.If) -> bool:
    """Returns whether it is `if __name__ == "__main__":`."""
    return ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")


def collect(scope: dict[str, Any]) -> Iterator[Callable]:
    """The tests that pytest would collect: functions, methods of classes, and those of unittest."""
    unittest = sys.modules.get("unittest")
    for name, value in list(scope.items()):
        if getattr(value, "__module__", "") != "tests":
            continue
        if unittest and isinstance(value, type) and issubclass(value, unittest.TestCase):
            suite = unittest.defaultTestLoader.loadTestsFromTestCase(value)
            if suite.countTestCases():
                yield functools.partial(run_suite, suite)
        elif isinstance(value, type) and name.startswith("Test"):
            for method in [name for name in dir(value) if name.startswith("test")]:
                run = functools.partial(run_method, value, method)
                yield from with_arguments(run, getattr(value, method))
        elif isinstance(value, FunctionType) and name.startswith("test"):
            yield from with_arguments(value, value)


def with_arguments(run: Callable, function: Callable) -> Iterator[Callable]:
    """Yields the test once, or once for each set of arguments that pytest's parametrize gives it.

    A function that needs other arguments is none of the tests: they call it.
    """
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    choices = []
    given = {"self"}
    for mark in marks:
        names, values = mark.args[:2]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        given.update(names)
        choices.append([named_values(names, value) for value in values])
    if needed_arguments(function) - given:
        return
    for choice in itertools.product(*choices):
        arguments: dict[str, Any] = {}
        for part in choice:
            arguments |= part
        yield functools.partial(run, **arguments)


def named_values(names: list[str], value: Any) -> dict[str, Any]:
    if type(value).__name__ == "ParameterSet":  # of pytest.param
        value = value.values
    elif len(names) == 1:
        value = [value]
    return dict(zip(names, value, strict=True))


def needed_arguments(function: Callable) -> set[str]:
    return {
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def run_method(kind: type, name: str, **arguments: Any) -> None:
    """Runs a method of a new object of a class, between what pytest runs before and after it."""
    tests = kind()
    method = getattr(tests, name)
    hooks = ("setup_class", "setup_method", "setup"), ("teardown_method", "teardown_class")
    for before in hooks[0]:
        run_hook(tests, before, method)
    try:
        run_test(functools.partial(method, **arguments))
    finally:
        for after in hooks[1]:
            run_hook(tests, after, method)


def run_hook(tests: Any, name: str, method: Callable) -> None:
    hook = getattr(tests, name, None)
    if hook is not None:
        takes_method = name.endswith("_method") and inspect.signature(hook).parameters
        run_test(functools.partial(hook, method) if takes_method else hook)


def run_test(test: Callable) -> None:
    result = test()
    if inspect.iscoroutine(result):
        asyncio.run(result)


def run_suite(suite: Any) -> None:
    """Runs tests of unittest. AssertionError if one fails, or if all are skipped."""
    result: Any = importlib.import_module("unittest").TestResult()
    suite.run(result)
    for test, text in (*result.failures, *result.errors):
        raise AssertionError(f"{test.id()}: {text.strip().splitlines()[-1]}")
    if not result.wasSuccessful() or result.testsRun == len(result.skipped):
        raise AssertionError("a test passed that was to fail, or all tests are skipped")
