"""Python files of the user, which keys of the config name: environments, losses, estimators.

A file is imported as a module named after its path, so any process can import it by that name:
objects of the file can be pickled, and processes that it starts find its functions. Two files may
have the same file name, and a file may be named like a standard module.
"""

import difflib
import importlib.abc
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote_to_bytes

PACKAGE = Path(__file__).resolve().parent
# Frames of these files are left out of tracebacks: those that call or import a user's file.
OWN_FILES = (str(Path(__file__).parent / "env") + os.sep, __file__, "<frozen importlib")

__path__: list[str] = []  # this module is a package: the finder below finds the modules in it
# Two threads that import one file would remove each other's module. A file may import another one
# by this function, so a thread may take the lock again.
_importing = threading.RLock()


class UserFileFinder(importlib.abc.MetaPathFinder):
    """Finds `rl2.user_files.PATH`, where PATH is a file as `module_name` writes it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, quoted = name.rpartition(".")
        if package != __name__:
            return None
        file = Path(os.fsdecode(unquote_to_bytes(quoted)))
        # As for a script, the file may import modules of its own folder.
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        return importlib.util.spec_from_file_location(name, file)


sys.meta_path.append(UserFileFinder())


def module_name(file: Path) -> str:
    """Returns the name by which every process can import the file."""
    return f"{__name__}.{quote(os.fsencode(file.resolve())).replace('.', '%2E')}"


def import_file(file: Path) -> ModuleType:
    """Runs the file and returns its module, also if it was imported before.

    Raises ValueError if the file fails, with the traceback from its first line on.
    """
    name = module_name(file)
    with _importing:
        sys.modules.pop(name, None)
        try:
            __import__(name)
        except SyntaxError as error:
            line = (error.text or "").strip()
            place = f"{error.filename}:{error.lineno}"
            raise ValueError(f"fails on import: {place}: {error.msg}: {line}") from error
        except KeyboardInterrupt:
            raise  # the user's
        except BaseException as error:  # also an exit
            raise ValueError(f"fails on import:\n{user_traceback(error)[0]}") from error
        return sys.modules[name]


def user_traceback(error: BaseException) -> tuple[str, str]:
    """Returns the traceback of `error` without the frames of rl2, and the places in it.

    The places are "file:line file:line ...". A line that occurs again in a recursion is listed
    once.
    """
    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename.startswith(OWN_FILES):
        frame = frame.tb_next
    summaries = traceback.extract_tb(frame)
    places = dict.fromkeys(f"{summary.filename}:{summary.lineno}" for summary in summaries)
    return "".join(traceback.format_exception(type(error), error, frame)), " ".join(places)


def describe_failure(error: BaseException, file: Path) -> str:
    """Returns the error in one line, with the last line of the user's file that led to it."""
    reason = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f"{reason} (line {lines[-1]} of {file.name})" if lines else reason


def find_env_file(path: str) -> Path:
    """Returns the env file that `path` names: an existing file, or a ready-made env by bare name.

    Raises ValueError, with the names of the ready-made envs, when `path` is neither.
    """
    file = Path(path).expanduser()
    if file.is_file():
        return file
    # A wheel carries the ready-made envs inside the package. In a checkout they are beside it.
    folder = PACKAGE / "ready_envs"
    if not folder.is_dir():
        folder = PACKAGE.parent / "envs"
    ready_made = {env.stem: env for env in sorted(folder.glob("*.py"))}
    if path in ready_made:
        return ready_made[path]
    near = difflib.get_close_matches(file.stem, ready_made, n=2)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(
        f"rollout.env_path={path}: no such file, and no ready-made env of that name; "
        f"{hint}there are {', '.join(ready_made)}"
    )


def import_env_file(path: str) -> ModuleType:
    """Runs an env file and returns its module. ValueError if there is none or it fails."""
    file = find_env_file(path)
    if file.suffix != ".py":
        raise ValueError(f"rollout.env_path={path}: expected a Python file, ending in .py")
    try:
        return import_file(file)
    except ValueError as error:
        hint = ""
        if isinstance(error.__cause__, ModuleNotFoundError):
            hint = f"install it for {sys.executable}; the first lines of {file.name} may say how"
        raise ValueError(f"rollout.env_path={path} {error}{hint}") from error
