"""Tests of a program that runs in another sandbox, so that no code of it decides the verdict.

The two processes are connected by their standard inputs. One runs `server.serve(PROGRAM)`, the
other `runner.check(TESTS, TOKEN)`. In the tests a name of the program is a `Remote`. The server
makes the calls of it and sends the results:

- Values of Python's own types and NumPy's arrays and scalars arrive as copies (values.py).
- An object of a class of the program that derives from int, str, tuple or another immutable type
  (an IntEnum, a namedtuple) arrives as a copy that also knows its original.
- All else arrives as a Remote, and what is done with it is done by the server.

A comparison of an object with a value that the tests have is never done by the server: the program
neither sees what is expected, nor can its `__eq__` decide. It decides about two objects of its own.

A sandbox has no rl2, so both programs begin with the texts of these modules.
"""

from pathlib import Path

# Each imports only those before it.
MODULES = ("values", "connection", "server", "references", "runner")


def _read_texts() -> dict[str, str]:
    """Returns the texts of the modules, by the names that they have in a sandbox.

    The names have no dots: pickle imports what it names, and with it all parents of a name.
    """
    texts = {}
    for module in MODULES:
        text = Path(__file__).with_name(f"{module}.py").read_text()
        texts[f"rl2_remote_{module}"] = text.replace(f"from {__name__}.", "from rl2_remote_")
    return texts


# `as_json` is for tests that call one function: rl2/rewards/code.py writes them.
IMPORTS = f"""
import sys
from types import ModuleType
for name, text in {_read_texts()!r}.items():
    sys.modules[name] = ModuleType(name)
    exec(compile(text, name, "exec"), vars(sys.modules[name]))
from rl2_remote_runner import check
from rl2_remote_server import serve
from rl2_remote_values import as_json
"""


def server_program(program: str) -> str:
    """Returns the text of the process that runs `program` and makes the calls."""
    return f"{IMPORTS}serve({program!r})"


def tests_program(tests: str, token: str) -> str:
    """Returns the text of the process that runs the tests.

    It writes `token` when all have passed.
    """
    return f"{IMPORTS}check({tests!r}, {token!r})"
