"""Env files as modules, whose names hold the files' paths: any process can import them by name.

So objects of an env file can be pickled, and processes that the env starts find its functions. Two
env files may have the same file name, and a file may be named as a standard module is.
"""

import importlib.abc
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote_to_bytes

from rl2.env.results import user_traceback
from rl2.user_files import find_env_file

__path__: list[str] = []  # this module is a package: the finder below finds the modules in it
# Two threads that import one file would remove the module of each other. An env file may import
# another one by this function, so a thread may take the lock again.
_importing = threading.RLock()


class EnvFileFinder(importlib.abc.MetaPathFinder):
    """Finds `rl2.env.files.PATH`, where PATH is a file as `module_name` writes it."""

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


sys.meta_path.append(EnvFileFinder())


def module_name(file: Path) -> str:
    """The name by which every process can import an env file."""
    return f"{__name__}.{quote(os.fsencode(file.resolve())).replace('.', '%2E')}"


def import_env_file(path: str) -> ModuleType:
    """The module of an env file, imported anew. ValueError if there is none or it fails."""
    file = find_env_file(path)
    if file.suffix != ".py":
        raise ValueError(f"rollout.env_path={path}: expected a Python file, ending in .py")
    name = module_name(file)
    with _importing:
        return _import_module(path, name)


def _import_module(path: str, name: str) -> ModuleType:
    sys.modules.pop(name, None)
    try:
        __import__(name)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ValueError(f"{error.filename}:{error.lineno}: {error.msg}: {line}") from error
    except KeyboardInterrupt:
        raise  # the user's
    except BaseException as error:
        text, _ = user_traceback(error)
        raise ValueError(f"rollout.env_path={path} fails on import:\n{text}") from error
    return sys.modules[name]
