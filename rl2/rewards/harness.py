"""What runs in the two sandboxes of a program and its tests: `serve` in one, `check` in the other.

A sandbox has no rl2, so both programs begin with the text of this file (rl2/rewards/code.py). The
processes are connected by their standard inputs. The tests ask for calls of the program's
functions, and only plain data crosses, in JSON: numbers, texts, bytes, None, and lists, tuples,
sets and dicts of them; iterators become lists. So no code of the program runs where the tests
decide, and the program sees no more of the tests than the arguments of its functions.

No object of the program is kept between calls. A call that returns one ends the tests.
"""

import ast
import builtins
import functools
import inspect
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, NoReturn

MAX_INT = 2**63  # Python reads no decimal text of a number with more than 4,300 digits.
PROGRAM_ENDED = "the program has ended"  # what the tests write then
CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}


class Connection:
    """One end. The standard input is empty from then on."""

    def __init__(self) -> None:
        connection = os.dup(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self.reader = open(connection, "rb")
        self.writer = open(connection, "wb", closefd=False)

    def send(self, text: str) -> None:
        self.writer.write(text.encode() + b"\n")
        self.writer.flush()

    def encode(self, value: object) -> object:
        """Returns the value for JSON: [kind, content], or a scalar as it is.

        Of an object of a class that derives from a plain type, only the plain part is sent.
        """
        if value is None or isinstance(value, (str, float)):
            return value
        if isinstance(value, int):
            return value if -MAX_INT < value < MAX_INT else ("int", hex(value))
        if isinstance(value, bytes | bytearray):
            return "bytes", value.hex()
        for name, kind in CONTAINERS.items():
            if isinstance(value, kind):
                return name, [self.encode(item) for item in kind.__iter__(value)]
        if isinstance(value, dict):
            return "dict", [(self.encode(key), self.encode(x)) for key, x in dict.items(value)]
        return self.encode_object(value)

    def encode_object(self, value: object) -> object:
        raise NotImplementedError

    def decode(self, message: object) -> Any:
        if not isinstance(message, list):
            return message
        kind, content = message
        if kind in CONTAINERS:
            return CONTAINERS[kind](self.decode(item) for item in content)
        if kind == "dict":
            return {self.decode(key): self.decode(value) for key, value in content}
        if kind == "int":
            return int(content, 16)
        if kind == "bytes":
            return bytes.fromhex(content)
        return self.decode_object(kind, content)

    def decode_object(self, kind: str, content: object) -> object:
        raise NotImplementedError


class Server(Connection):
    """The end of the program."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self.module = module

    def encode_object(self, value: object) -> object:
        if isinstance(value, type) and issubclass(value, BaseException):
            return "error", bases_of(value)
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encode(value.tolist())
        if isinstance(value, Iterator):
            return self.encode(list(value))
        return "object", type(value).__name__

    def answer(self, path: str, arguments: object, keywords: object) -> None:
        """Sends what the function returns or raises; without arguments, the value at the path."""
        try:
            value = self.find(path)
            if arguments is not None:
                value = value(*self.decode(arguments), **self.decode(keywords))
            encoded = self.encode(value)
            if arguments is None and isinstance(encoded, tuple) and encoded[0] == "object":
                encoded = "name", path
            text = json.dumps((encoded, None))
        except BaseException as error:
            try:
                text = json.dumps((None, (bases_of(type(error)), self.encode(error.args))))
            except Exception:
                text = json.dumps((None, (["Exception"], self.encode(["no message"]))))
        self.send(text)

    def find(self, path: str) -> Any:
        """What is at NAME.NAME... of the program; NAME() is a new object of a class."""
        value: Any = self.module
        for name in path.split("."):
            value = getattr(value, name.removesuffix("()"))
            if name.endswith("()"):
                value = value()
        return value


def bases_of(kind: type) -> list[str]:
    """Returns the names of a class of exceptions and of its bases, up to the first of Python."""
    names = []
    for base in kind.__mro__:
        names.append(base.__name__)
        if base.__module__ == "builtins":
            break
    return names


def serve(program: str) -> None:
    """Runs the program, which defines functions and classes. Then it makes calls for the tests."""
    module = ModuleType("program")
    sys.modules["program"] = module
    server = Server(module)
    exec(compile(program, "program", "exec"), vars(module))
    for line in server.reader:
        server.answer(*json.loads(line))


class Client(Connection):
    """The end of the tests."""

    num_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, type[BaseException]] = {}

    def ask(self, path: str, arguments: object = None, keywords: object = None) -> Any:
        """Returns what the function returns or raises in the program's process."""
        request = json.dumps((path, self.encode(arguments), self.encode(keywords)))
        try:
            self.send(request)
            line = self.reader.readline()
        except OSError:
            line = b""
        if not line:
            fail(PROGRAM_ENDED)
        try:
            value, error = json.loads(line)
            value = self.decode(value)
            error = error and self.make_error(error[0], self.decode(error[1]))
        except Exception as problem:
            fail(f"the program has sent what is no result: {problem!r:.100}")
        if isinstance(error, StopIteration):
            raise RuntimeError("the program raised StopIteration, which may end a loop")
        if error is not None:
            raise error
        return value

    def encode_object(self, value: object) -> object:
        fail(f"the tests pass a {type(value).__name__} to the program, which takes plain data")

    def decode_object(self, kind: str, content: Any) -> Any:
        if kind == "error":
            return self.error_class(content)
        if kind == "name":
            return ProgramName(self, str(content))
        fail(f"the program returned an object of the class {content}: tests see plain data only")

    def error_class(self, names: list[str]) -> type[BaseException]:
        """Returns a class that can be raised and caught, for the names of a class and its bases."""
        *own, last = names
        kind = getattr(builtins, last)
        if not issubclass(kind, BaseException):
            kind = Exception
        for name in reversed(own):
            kind = self.errors.setdefault(name, type(name, (kind,), {}))
        return kind

    def make_error(self, names: list[str], arguments: tuple) -> BaseException:
        try:
            return self.error_class(names)(*arguments)
        except TypeError:
            return Exception(*arguments)


class ProgramName:
    """A function or a class of the program, for the tests: what is at a path there.

    `Solution()` is a name too: each call of a method makes a new object of this class.
    """

    __slots__ = ("_client", "_path")

    def __init__(self, client: Client, path: str):
        self._client = client
        self._path = path

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._client.ask(f"{self._path}.{name}".lstrip("."))

    def __call__(self, *arguments: object, **keywords: object) -> object:
        if self._path == "Solution" and not arguments and not keywords:
            return ProgramName(self._client, "Solution()")
        Client.num_calls += 1
        return self._client.ask(self._path, arguments, keywords)


def fail(message: str) -> NoReturn:
    """Ends the tests, which cannot catch this."""
    os.write(2, message.encode(errors="replace"))
    os._exit(1)


def check(tests: str, token: str) -> NoReturn:
    """Runs the tests. When all have passed, writes the token, which they do not know.

    Then comes what makes the tests useless for any program, if they are.
    """
    program = ProgramName(Client(), "")
    solution = ModuleType("solution")
    # The names that the tests use are there without an import.
    vars(solution).update(__getattr__=functools.partial(getattr, program), __all__=[])
    module = ModuleType("tests")
    sys.modules.update(solution=solution, tests=module)
    scope = vars(module)
    tree = ast.parse(tests)
    names = find_names(tree)
    for name in names:
        with suppress(AttributeError):
            scope[name] = getattr(program, name)
    exec(compile(tree, "tests", "exec"), scope)
    for name, value in list(scope.items()):
        is_own = getattr(value, "__module__", "") == "tests"
        if is_own and name.startswith("test") and is_test(value):
            value()
    sys.stdout.flush()
    os.write(1, f"{token}{find_problem(scope, names)}".encode())
    os._exit(0)


def find_problem(scope: dict[str, object], names: set[str]) -> str:
    """Says what the tests lack, or nothing. `names` are those that they use."""
    for name, value in scope.items():
        is_own = getattr(value, "__module__", "") == "tests" and name not in names
        is_left_out = isinstance(value, FunctionType | type) and not is_test(value)
        if is_own and is_left_out and name.startswith(("test", "Test")):
            return (
                f"the tests have {name}, and nothing calls it. Add a call, or write functions "
                "without arguments: fixtures, parameters, async functions and classes of tests are "
                "not supported"
            )
    if Client.num_calls:
        return ""
    return (
        "the tests run nothing of the program. Add a call, such as check(f), outside of `if "
        "__name__ == ...`, or a function test_...() without arguments"
    )


def find_names(tree: ast.Module) -> set[str]:
    """Returns the names in the tests that the program may provide.

    It must not provide what judges it, such as `math` in math.isclose(f(1), 0.5).
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
    return names - judges - (sys.stdlib_module_names - called)


def is_test(value: object) -> bool:
    """Whether it is a function that can be called without arguments, and is not async."""
    if not isinstance(value, FunctionType) or inspect.iscoroutinefunction(value):
        return False
    parameters = inspect.signature(value).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in kinds for p in parameters)
