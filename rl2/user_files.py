"""Python files of the user, which keys of the config name."""

import difflib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def find_env_file(path: str) -> Path:
    """The env file that `path` names: a file that exists, or a ready-made env by its bare name.

    Raises ValueError, with the names of the ready-made envs, when `path` is neither.
    """
    file = Path(path).expanduser()
    if file.is_file():
        return file
    # A wheel carries the ready-made envs inside the package. In a checkout they stand beside it.
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
