"""What Python code gives to `rl2.train`, as keys of the config and as files of the run folder.

Rows and functions become files, so a run that Python code has started is recorded, resumed and
compared as any other one. Nothing here needs more than the standard library.
"""

import hashlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from rl2.config.values import flatten

FOLDER = "inputs"  # in the run folder
HASH_LENGTH = 12
RECORD = """\
raise RuntimeError(
    "the functions of this environment were given to rl2.train by Python code, and this file is "
    "only a record of them: make a file of them, with what they use from elsewhere"
)
"""


@dataclass(frozen=True)
class InputFile:
    """A file of the run folder. Its name has a hash, so another content never replaces it."""

    title: str
    suffix: str
    text: str

    @property
    def path(self) -> str:
        """The path in the run folder."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return f"{FOLDER}/{self.title}-{digest[:HASH_LENGTH]}{self.suffix}"


@dataclass
class Inputs:
    """Keys that Python code sets, and the files that other keys name."""

    values: dict[str, object] = field(default_factory=dict)  # by key
    files: list[InputFile] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)  # by key: what has set it

    def set_keys(self, tree: Mapping[str, object]) -> None:
        """Sets keys, "actor.lr" or nested dicts. ValueError for a key that is given twice."""
        for key, value in flatten(tree):
            self.set_value(key, key, value)

    def set_value(self, argument: str, key: str, value: object) -> None:
        """Sets the key that an argument of `rl2.train` stands for.

        ValueError if another argument has set it, or a part of it.
        """
        for other_key, other in self.arguments.items():
            if f"{key}.".startswith(f"{other_key}.") or f"{other_key}.".startswith(f"{key}."):
                raise ValueError(f"{other} and {argument}: both set {key}; give one of them")
        self.arguments[key] = argument
        self.values[key] = _plain(value)

    def set_rows(self, argument: str, key: str, rows: str | PurePath | Iterable[object]) -> None:
        """Sets the key to a path, or to the file of rows. ValueError for rows that are no JSON."""
        if isinstance(rows, str | PurePath):
            self.set_value(argument, key, rows)
            return
        title = re.sub(r"\W+", "_", argument).strip("_")
        self._set_file(argument, key, InputFile(title, ".jsonl", write_rows(argument, rows)))

    def set_functions(self, functions: Mapping[str, Callable]) -> None:
        """Sets rollout.env_path to the record of the functions."""
        file = InputFile("env", ".py", record_functions(functions))
        self._set_file(", ".join(functions), "rollout.env_path", file)

    def _set_file(self, argument: str, key: str, file: InputFile) -> None:
        self.set_value(argument, key, f"${{trainer.save_dir}}/{file.path}")
        self.files.append(file)

    def write(self, run_folder: Path) -> None:
        """Writes the files that are not there yet.

        The folder need not be locked: what has the name of a file has its content.
        """
        for file in self.files:
            path = run_folder / file.path
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(file.text, encoding="utf-8")
            partial.replace(path)


def _plain(value: object) -> object:
    """Returns a value of Python code as a file of keys would give it."""
    if hasattr(value, "tolist"):  # a number or an array of NumPy or torch
        return value.tolist()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def write_rows(name: str, rows: Iterable[object]) -> str:
    """Returns the rows as lines of JSON. ValueError names the first row that is not JSON."""
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            hint = "; of a pandas.DataFrame give frame.to_dict('records')"
            raise ValueError(f"{name}[{number}]: expected a dict, got {row!r:.80}{hint}")
        for column, value in row.items():
            try:
                _check_keys(value)
                json.dumps(value, ensure_ascii=False).encode()
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(
                    f"{name}[{number}][{column!r}]: {error}; rows are saved as JSON: convert the "
                    "value, or give the path of a parquet file"
                ) from error
        lines.append(json.dumps(dict(row), ensure_ascii=False) + "\n")
    return "".join(lines)


def _check_keys(value: object) -> None:
    """TypeError for a dict with a key that is not a text, which JSON would turn into one."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a text")
        _check_keys(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)


def record_functions(functions: Mapping[str, Callable]) -> str:
    """A Python file with the source of the functions in comments, as far as it is known.

    On import it raises RuntimeError: the source alone need not be the function.
    """
    return "\n".join([RECORD] + [_describe(name, f) for name, f in functions.items()])


def _describe(name: str, function: Callable) -> str:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # an object, a function in C, code that was typed
        source = getattr(function, "__qualname__", type(function).__qualname__) + "\n"
    return f"# {name}:\n" + textwrap.indent(source, "# ")
