"""Env files as modules."""

import sys
from types import ModuleType

from rl2.user_files import find_env_file, import_file


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
