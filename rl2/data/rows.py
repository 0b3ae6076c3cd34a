"""From data files to rows, which are dicts. A malformed row is refused and named, never skipped."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rl2.progress import mark

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
MAX_LISTED_PROBLEMS = 5
MAX_SHOWN_CHARACTERS = 100  # of a wrong value, in a message
MAX_CSV_CELL_BYTES = 2**31 - 1
MISSING_CELL: Any = object()  # the value of a cell that a csv row lacks

# (where the row is, the row as its format gives it: a line of JSON is still text)
LocatedRow = tuple[str, Any]


def load_rows(
    path: str, split: str = "train", check: Callable[[dict], None] | None = None
) -> list[dict]:
    """The rows of a data file, of a folder of data files, or of a data set of the hub.

    A file is json (a list, or lines), jsonl, csv, parquet or arrow. A folder gives the rows of its
    files in the order of their names. If it has a sub-folder called `split`, or files whose names
    begin with `split` (train.jsonl, train-00000.parquet), only those are read. The name of a hub
    data set may end in a configuration: openai/gsm8k:main.

    In every format `messages` and `tools` may be JSON text, as they are in csv. Other text in
    `messages` is a plain prompt. All other cells of a csv file stay text.

    `check(row)` raises ValueError for a row that does not suit. All rows are read and checked; then
    ValueError lists the first problems, each with its file, row and column. Rows are counted by
    the lines of a jsonl or csv file, from 1 in other formats.
    """
    rows, problems = [], []
    for location, raw_row in _read_rows(path, split):
        mark()
        try:
            row = _parse_row(raw_row)
            if check:
                check(row)
        except ValueError as error:
            problems.append(f"{location}: {error}")
        else:
            rows.append(row)
    if problems:
        listed = problems[:MAX_LISTED_PROBLEMS]
        if len(problems) > len(listed):
            listed.append(f"... and {len(problems) - len(listed)} more")
        raise ValueError(f"malformed rows in {path} ({len(problems)}):\n" + "\n".join(listed))
    if not rows:
        raise ValueError(f"{path} has no rows (split {split})")
    return rows


def check_ppo_row(row: dict) -> None:
    """ValueError unless the row is one for PPO: `messages` that end before the reply, and `answer`.

    `answer` may be anything. Other columns are passed to the environment.
    """
    check_messages(row)
    if "answer" not in row:
        raise ValueError(_missing_column_message(row, "answer"))
    check_ends_before_reply(row["messages"])


def check_messages(row: dict) -> None:
    """ValueError unless `messages` is text or a list of messages, and not empty.

    A message is {"role": ..., "content": ...}. Its content is text or a list of parts, and may be
    missing beside `tool_calls`.
    """
    if "messages" not in row:
        raise ValueError(_missing_column_message(row, "messages"))
    messages = row["messages"]
    if not isinstance(messages, str | list) or not messages:
        raise ValueError(
            "column 'messages': expected text or a list of messages, not empty, "
            f"got {abbreviate(messages)}"
        )
    if isinstance(messages, list):
        for message in messages:
            _check_message(message)


def check_ends_before_reply(messages: str | list[dict]) -> None:
    """ValueError if the last message is the assistant's: then there is no reply left to give."""
    if isinstance(messages, list) and messages[-1]["role"] == "assistant":
        raise ValueError(
            "column 'messages': expected a prompt, but the last message is the assistant's"
        )


def text_column(row: dict, column: str) -> str:
    """The text in a column. ValueError if it is missing, empty or no text."""
    if column not in row:
        raise ValueError(_missing_column_message(row, column))
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"column '{column}': expected text, not empty, got {abbreviate(text)}")
    return text


def abbreviate(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value)
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return text[:MAX_SHOWN_CHARACTERS] + "..."


def _missing_column_message(row: dict, column: str) -> str:
    return f"column '{column}' is missing; the row has {', '.join(row)}"


def _check_message(message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(
            "column 'messages': expected {'role': ..., 'content': ...}, "
            f"got {abbreviate(message)}"
        )
    if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
        raise ValueError(
            f"column 'messages': expected content that is text or a list, got {abbreviate(message)}"
        )


def _parse_row(raw_row: Any) -> dict:
    """The row, with `messages` and `tools` parsed from JSON text and without nulls.

    Columnar files give each struct the keys of all structs, with null for those it lacks. Chat
    templates only ask whether a key exists.
    """
    row = _parse_json(raw_row, "row") if isinstance(raw_row, str) else raw_row
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {abbreviate(row)}")
    if None in row:  # where csv.DictReader puts the cells that have no column
        raise ValueError("expected a cell for each column of the header, got more")
    if MISSING_CELL in row.values():
        raise ValueError("expected a cell for each column of the header, got fewer")
    for column in ("messages", "tools"):
        if column in row:
            row[column] = _drop_nulls(_parse_cell(row[column], column))
    return row


def _parse_cell(value: Any, column: str) -> Any:
    """The value of `messages` or `tools`. Text in `messages` is JSON if it begins like a list."""
    if not isinstance(value, str):
        return value
    if column == "messages" and not re.match(r"\s*\[\s*\{", value):
        return value
    return _parse_json(value or "null", f"column '{column}'")


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: expected JSON ({error}), got {abbreviate(text)}") from error


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return value


def _read_rows(path: str, split: str) -> Iterator[LocatedRow]:
    local_path = Path(path).expanduser()
    if not local_path.exists():
        if local_path.suffix in SUFFIXES or path.startswith(("/", ".", "~")):
            raise ValueError(f"data path {path}: no such file or folder")
        yield from _number_rows(path, _load_from_hub(path, split))
        return
    for file in _list_files(local_path, split) if local_path.is_dir() else [local_path]:
        if file.suffix not in SUFFIXES:
            raise ValueError(
                f"data path {file}: expected a file that ends in one of {', '.join(SUFFIXES)}"
            )
        try:
            yield from _READERS[file.suffix](file)
        except (UnicodeDecodeError, json.JSONDecodeError, csv.Error, pyarrow.ArrowInvalid) as error:
            raise ValueError(f"{file} is not a readable {file.suffix[1:]} file: {error}") from error


def _load_from_hub(path: str, split: str) -> Iterable[dict]:
    from datasets import load_dataset  # slow to import, and not needed for files

    name, _, configuration = path.partition(":")
    try:
        return load_dataset(name, configuration or None, split=split)
    except (OSError, ValueError) as error:  # not found, offline, unknown split or configuration
        raise ValueError(
            f"data path {path}: no such file or folder here, and the hub says: {error}"
        ) from error


def _list_files(folder: Path, split: str) -> list[Path]:
    if (folder / split).is_dir():
        folder = folder / split
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise ValueError(
            f"data path {folder}: this folder has no file that ends in one of {', '.join(SUFFIXES)}"
        )
    of_split = [file for file in files if re.match(rf"{re.escape(split)}[-_.]", file.name)]
    return of_split or files


def _number_rows(source: str | Path, rows: Iterable) -> Iterator[LocatedRow]:
    return ((f"{source}, row {number}", row) for number, row in enumerate(rows, start=1))


def _read_json(file: Path) -> Iterator[LocatedRow]:
    text = file.read_text(encoding="utf-8-sig")
    if file.suffix == ".json" and text.lstrip().startswith("["):
        return _number_rows(file, json.loads(text))
    # Not splitlines(), which also splits at characters that JSON strings may hold.
    lines = _number_rows(file, text.split("\n"))
    return ((location, line) for location, line in lines if line.strip())


def _read_csv(file: Path) -> Iterator[LocatedRow]:
    csv.field_size_limit(MAX_CSV_CELL_BYTES)  # the default is 128 KiB
    with open(file, encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, restval=MISSING_CELL)
        first_line = 2  # a row may span several lines: the first of them names it
        for row in reader:
            yield f"{file}, row {first_line}", row
            first_line = reader.line_num + 1


def _read_parquet(file: Path) -> Iterator[LocatedRow]:
    return _number_rows(file, pyarrow.parquet.read_table(file).to_pylist())


def _read_arrow(file: Path) -> Iterator[LocatedRow]:
    source = pyarrow.memory_map(str(file))
    is_file_format = source.read(6) == b"ARROW1"
    source.seek(0)
    # `datasets` writes the stream format.
    open_table = pyarrow.ipc.open_file if is_file_format else pyarrow.ipc.open_stream
    return _number_rows(file, open_table(source).read_all().to_pylist())


_READERS = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
