"""Rows -> prompts and training examples. What is wrong with the user's data is named and refused, or counted; nothing
passes in silence."""

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


MAX_LISTED = 5  # problems in one message


NO_CELL = object()  # where a csv row is too short


def load_rows(
    path: str, split: str = "train", check: Callable[[dict], None] | None = None
) -> list[dict]:
    """Rows of a json (list or lines), jsonl, csv, parquet or arrow file, of a folder of these, or of a hub data set.

    A folder gives its files in order of name; if some are called after `split` (`train.jsonl`, `train-00000.parquet`)
    or lie in a sub-folder called so, only those. A hub name may carry a configuration: `openai/gsm8k:main`.
    In every format `messages` and `tools` may be JSON text (in csv they are); `messages` that is other text is a plain
    prompt, to which no chat template is applied. All other cells of a csv stay text.

    `check(row)` raises ValueError where a row does not suit. All rows are read and checked; the ValueError of this
    function lists the first problems, each with file, row (its line in jsonl and csv; else counted from 1) and column.
    """
    rows, problems = [], []
    for place, raw in _read(path, split):
        try:
            row = _row(raw)
            if check:
                check(row)
        except ValueError as error:
            problems.append(f"{place}: {error}")
        else:
            rows.append(row)
    if problems:
        more = f"\n... and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        raise ValueError(
            f"malformed rows in {path} ({len(problems)}):\n"
            + "\n".join(problems[:MAX_LISTED])
            + more
        )
    if not rows:
        raise ValueError(f"{path} has no rows (split {split})")
    return rows


def _read(path: str, split: str) -> Iterator[tuple[str, object]]:
    """(place, row) of every row, as its format gives it: a line of json is still text."""
    local = Path(path).expanduser()
    if not local.exists():
        if local.suffix in SUFFIXES or path.startswith(("/", ".", "~")):
            raise ValueError(f"data path {path}: no such file or folder")
        yield from _numbered(path, _load_from_hub(path, split))
        return
    for file in _files(local, split) if local.is_dir() else [local]:
        if file.suffix not in SUFFIXES:
            raise ValueError(
                f"data path {file}: expected a file that ends in one of {', '.join(SUFFIXES)}"
            )
        try:
            yield from _READERS[file.suffix](file)
        except (UnicodeDecodeError, json.JSONDecodeError, csv.Error, pyarrow.ArrowInvalid) as error:
            raise ValueError(f"{file} is not a readable {file.suffix[1:]} file: {error}") from error


def _load_from_hub(path, split):
    from datasets import load_dataset  # slow to import, and not needed for files

    name, _, config = path.partition(":")
    try:
        return load_dataset(name, config or None, split=split)
    except (OSError, ValueError) as error:  # not found, offline, unknown split or configuration
        raise ValueError(
            f"data path {path}: no such file or folder here, and the hub says: {error}"
        ) from error


def _files(folder: Path, split: str) -> list[Path]:
    if (folder / split).is_dir():
        folder = folder / split
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise ValueError(
            f"data path {folder}: this folder has no file that ends in one of {', '.join(SUFFIXES)}"
        )
    return [file for file in files if re.match(rf"{re.escape(split)}[-_.]", file.name)] or files


def _numbered(place, rows, start=1):
    return ((f"{place}, row {number}", row) for number, row in enumerate(rows, start))


def _read_json(file):
    text = file.read_text(encoding="utf-8-sig")
    if file.suffix == ".json" and text.lstrip().startswith("["):
        return _numbered(file, json.loads(text))
    lines = _numbered(
        file, text.split("\n")
    )  # splitlines() also cuts at characters that JSON strings may hold
    return ((place, line) for place, line in lines if line.strip())


def _read_csv(file):
    csv.field_size_limit(2**31 - 1)  # the default refuses a cell of more than 128 KiB
    with open(file, encoding="utf-8-sig", newline="") as lines:
        reader, line = (
            csv.DictReader(lines, restval=NO_CELL),
            2,
        )  # a row may span several lines: named by its first
        for row in reader:
            yield f"{file}, row {line}", row
            line = reader.line_num + 1


def _read_parquet(file):
    return _numbered(file, pyarrow.parquet.read_table(file).to_pylist())


def _read_arrow(file):
    source = pyarrow.memory_map(str(file))
    is_file = source.read(6) == b"ARROW1"  # else a stream, which is what `datasets` writes
    source.seek(0)
    table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source).read_all()
    return _numbered(file, table.to_pylist())


_READERS = dict(
    zip(SUFFIXES, [_read_json, _read_json, _read_csv, _read_parquet, _read_arrow], strict=True)
)


def _row(raw) -> dict:
    """The row with `messages` and `tools` parsed and free of nulls: columnar files fill each struct with the keys of
    all, and templates ask only whether a key is there."""
    row = _parse(raw, "row") if isinstance(raw, str) else raw
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {_show(row)}")
    if None in row or NO_CELL in row.values():
        raise ValueError(
            f"expected a cell for each column of the header, got {'more' if None in row else 'fewer'}"
        )
    for column in row.keys() & {"messages", "tools"}:
        value = row[column]
        if isinstance(value, str) and (column == "tools" or re.match(r"\s*\[\s*\{", value)):
            value = _parse(value or "null", f"column '{column}'")
        row[column] = _drop_nulls(value)
    return row


def _parse(text, what):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what}: expected JSON ({error}), got {_show(text)}") from error


def _drop_nulls(value):
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def check_ppo_row(row: dict) -> None:
    """A row of PPO has `messages`, a prompt that ends before the reply to be sampled, and `answer`: anything. Other
    columns pass through to the env."""
    check_messages(row)
    if "answer" not in row:
        raise ValueError(f"column 'answer' is missing; the row has {', '.join(row)}")
    _check_prompt(row["messages"])


def _check_prompt(messages):
    if isinstance(messages, list) and messages[-1]["role"] == "assistant":
        raise ValueError(
            "column 'messages': expected a prompt, but the last message is the assistant's"
        )


def check_messages(row: dict) -> None:
    """`messages` is text or a list of {"role", "content"}, not empty; content is text or a list of parts."""
    if "messages" not in row:
        raise ValueError(f"column 'messages' is missing; the row has {', '.join(row)}")
    messages = row["messages"]
    if not isinstance(messages, str | list) or not messages:
        raise ValueError(
            f"column 'messages': expected text or a list of messages, not empty, got {_show(messages)}"
        )
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"column 'messages': expected {{'role': ..., 'content': ...}}, got {_show(message)}"
            )
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise ValueError(
                f"column 'messages': expected content that is text or a list, got {_show(message)}"
            )


def _text(row, column) -> str:
    if column not in row:
        raise ValueError(f"column '{column}' is missing; the row has {', '.join(row)}")
    if not isinstance(row[column], str) or not row[column].strip():
        raise ValueError(f"column '{column}': expected text, not empty, got {_show(row[column])}")
    return row[column]


def _show(value) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
