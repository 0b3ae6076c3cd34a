"""From data files to rows, which are dicts. A malformed row is refused and named, never skipped."""

import csv
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pyarrow
import pyarrow.parquet
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError

from rl2.data.formats import ReadRow, rename_columns
from rl2.data.messages import abbreviate
from rl2.progress import mark

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
MAX_LISTED_PROBLEMS = 5
# Columns that may hold messages as JSON text.
CONVERSATION_COLUMNS = ("messages", "prompt", "conversations", "completion", "chosen", "rejected")
PARSED_COLUMNS = (*CONVERSATION_COLUMNS, "tools")
MAX_NESTING = 100  # levels of lists and objects in a cell: templates and environments recurse
TOO_DEEP = f"nested deeper than {MAX_NESTING} levels: flatten the value, or store it as text"
HUB_TIMEOUT_SECONDS = 10.0
MAX_CSV_CELL_BYTES = 2**31 - 1
ROWS_PER_BATCH = 1000
MISSING_CELL: Any = object()  # the value of a cell that a csv row lacks

# (where the row is, the row as its format gives it: a line of JSON is still text)
LocatedRow = tuple[str, Any]


def load_rows(
    path: str,
    split: str = "train",
    read: Callable[[dict], ReadRow] | None = None,
    columns: dict[str, str] | None = None,
    limit: int | None = None,
) -> list[dict]:
    """The rows of a data file, of a folder of data files, or of a data set of the hub.

    A file is json (a list, or lines), jsonl, csv, parquet or arrow. A folder gives the rows of its
    files in the order of their names. If it has a sub-folder called `split`, or files whose names
    begin with `split` (train.jsonl, train-00000.parquet), only those are read. The name of a hub
    data set may end in a configuration: openai/gsm8k:main.

    In every format `messages`, other columns of conversations and `tools` may be JSON text, as they
    are in csv. Other text in `messages` is a plain prompt. All other cells of a csv file stay text.

    `columns` renames columns, see `rename_columns`. `read(row)` is one of formats.py: it raises
    ValueError for a row that does not suit. All rows, or the first `limit`, are read; then
    ValueError lists the first problems, each with its file, row and column. Rows are counted by
    the lines of a jsonl or csv file, from 1 in other formats. The first process prints, once, how
    rows were read that are not in rl2's own form.
    """
    rows = []
    problems: dict[str, list[str]] = {}  # what is wrong -> where
    counts: Counter[str] = Counter()
    first_locations: dict[str, str] = {}
    for location, raw_row in itertools.islice(_read_rows(path, split), limit):
        mark()
        try:
            row = _parse_row(raw_row, columns or {})
            row, notes = read(row) if read else (row, [])
        except ValueError as error:
            problems.setdefault(str(error), []).append(location)
            continue
        rows.append(row)
        counts.update(notes)
        for note in notes:
            first_locations.setdefault(note, location)
    if problems:
        raise ValueError(_describe_problems(path, problems))
    if not rows:
        raise ValueError(f"{path} has no rows (split {split})")
    if os.environ.get("RANK", "0") == "0":
        for note, count in counts.items():
            place = f"{count} of {len(rows)} rows, first {first_locations[note]}"
            print(f"{note} ({place})", flush=True)
    return rows


def hash_data(path: str, split: str = "train") -> str:
    """A hash of the files that `load_rows` reads.

    "" if there are none: a data set of the hub is known by its name.
    """
    local_path = Path(path).expanduser()
    if not local_path.exists():
        return ""
    digest = hashlib.sha256()
    for file in _list_files(local_path, split) if local_path.is_dir() else [local_path]:
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _describe_problems(path: str, problems: dict[str, list[str]]) -> str:
    """The first problems, each with its first row and the number of others that have it."""
    num_rows = sum(len(locations) for locations in problems.values())
    lines = [f"malformed rows in {path} ({num_rows}):"]
    for problem, (first, *others) in itertools.islice(problems.items(), MAX_LISTED_PROBLEMS):
        lines.append(f"{first}: {problem}" + (f" ({len(others)} more rows)" if others else ""))
    if len(problems) > MAX_LISTED_PROBLEMS:
        lines.append(f"... and {len(problems) - MAX_LISTED_PROBLEMS} other problems")
    return "\n".join(lines)


def _parse_row(raw_row: Any, columns: dict[str, str]) -> dict:
    """The row with its columns renamed, and JSON text of messages and tools parsed, without nulls.

    Columnar files give each struct the keys of all structs, with null for those it lacks. Chat
    templates only ask whether a key exists.
    """
    if isinstance(raw_row, UnicodeDecodeError):
        raise raw_row
    row = _parse_json(raw_row, "row") if isinstance(raw_row, str) else raw_row
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {abbreviate(row)}")
    if None in row:  # where csv.DictReader puts the cells that have no column
        raise ValueError("expected a cell for each column of the header, got more")
    if MISSING_CELL in row.values():
        raise ValueError("expected a cell for each column of the header, got fewer")
    row = rename_columns(row, columns)
    for column, value in row.items():
        _check_value([column, value], column)
        if column in PARSED_COLUMNS:
            parsed = _parse_cell(value, column)
            _check_value(parsed, column)
            row[column] = _drop_nulls(parsed)
    return row


def _parse_cell(value: Any, column: str) -> Any:
    """The value of such a column. Text of a conversation is JSON if it begins like a list."""
    if not isinstance(value, str):
        return value
    if column != "tools" and not re.match(r"\s*\[\s*\{", value):
        return value
    return _parse_json(value or "null", f"column '{column}'")


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_to_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: expected JSON ({error}), got {abbreviate(text)}") from error
    except RecursionError:
        raise ValueError(f"{source}: {TOO_DEEP}") from None


def _check_value(value: Any, column: str, level: int = 0) -> None:
    """ValueError for nesting that is too deep, and for text that UTF-8 cannot hold.

    Such text has lone surrogates: halves of a pair, or bytes of a file that is not in UTF-8.
    Tokenizers refuse it, and no process could write it.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"column {column!r}: {error}; save the file as UTF-8, or remove the character: "
                f"{abbreviate(value)}"
            ) from None
    elif isinstance(value, dict | list | tuple):
        if level > MAX_NESTING:
            raise ValueError(f"column {column!r}: {TOO_DEEP}")
        for item in value:
            _check_value(item, column, level + 1)
        for item in value.values() if isinstance(value, dict) else ():
            _check_value(item, column, level + 1)


def _to_object(pairs: list[tuple[str, Any]]) -> dict:
    """A JSON object. ValueError if a key occurs twice, of which json keeps the last."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {twice!r} occurs twice in one object")
    return value


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
        except (ValueError, csv.Error) as error:  # of decoding, of JSON, of pyarrow
            raise ValueError(f"{file} is not a readable {file.suffix[1:]} file: {error}") from error


def _load_from_hub(path: str, split: str) -> Iterable[dict]:
    from datasets import config, load_dataset  # slow to import, and not needed for files

    name, _, configuration = path.partition(":")
    try:
        if not Path(config.HF_DATASETS_CACHE, name.replace("/", "___")).exists():
            _ask_hub(name)
        return load_dataset(name, configuration or None, split=split)
    except (OSError, ValueError) as error:  # not found, offline, unknown split or configuration
        raise ValueError(
            f"data path {path}: no such file or folder here, and the hub says: {error}"
        ) from error


def _ask_hub(name: str) -> None:
    """OSError if the hub is out of reach or has no such data set.

    One request stands for the retries of `datasets`, which take half a minute.
    """
    url = hf_hub_url(name, "README.md", repo_type="dataset")
    try:
        get_hf_file_metadata(url, timeout=HUB_TIMEOUT_SECONDS)
    except EntryNotFoundError:
        pass  # a data set without that file
    except Exception as error:  # of the hub's library and of the network's
        raise OSError(str(error).strip().splitlines()[0]) from error


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


def _open_text(file: Path, newline: str) -> TextIO:
    """The text of a file. Bytes that are not UTF-8 become lone surrogates.

    `_check_value` refuses them, and the row that has them is named.
    """
    return open(file, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _read_json(file: Path) -> Iterator[LocatedRow]:
    # Only a line feed ends a line: JSON strings may hold other characters that end lines.
    with _open_text(file, newline="\n") as lines:
        if file.suffix == ".json":
            text = lines.read()
            if text.lstrip().startswith("["):
                yield from _number_rows(file, _read_json_list(text))
                return
            lines.seek(0)
        for location, line in _number_rows(file, lines):
            if line.strip():
                yield location, line.rstrip("\n")


def _read_json_list(text: str) -> Iterator[Any]:
    """The items of a JSON list. ValueError names the first item that cannot be read."""
    decoder = json.JSONDecoder(object_pairs_hook=_to_object)
    position = _skip_space(text, text.index("[") + 1)
    for number in itertools.count(1):
        if number == 1 and text.startswith("]", position):
            break
        try:
            item, position = decoder.raw_decode(text, position)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
        except RecursionError:
            raise ValueError(f"row {number}: {TOO_DEEP}") from None
        yield item
        position = _skip_space(text, position)
        if not text.startswith(",", position):
            break
        position = _skip_space(text, position + 1)
    if text[position:].strip() != "]":
        raise json.JSONDecodeError("expected a comma, or one ] at the end", text, position)


def _skip_space(text: str, position: int) -> int:
    space = re.compile(r"\s*").match(text, position)
    return space.end() if space else position


def _read_csv(file: Path) -> Iterator[LocatedRow]:
    csv.field_size_limit(MAX_CSV_CELL_BYTES)  # the default is 128 KiB
    with _open_text(file, newline="") as lines:
        reader = csv.DictReader(lines, restval=MISSING_CELL)
        first_line = 2  # a row may span several lines: the first of them names it
        for row in reader:
            yield f"{file}, row {first_line}", row
            first_line = reader.line_num + 1


def _read_parquet(file: Path) -> Iterator[LocatedRow]:
    with pyarrow.parquet.ParquetFile(file) as source:
        yield from _number_rows(file, _read_batches(source.iter_batches()))


def _read_arrow(file: Path) -> Iterator[LocatedRow]:
    source = pyarrow.memory_map(str(file))
    is_file_format = source.read(6) == b"ARROW1"
    source.seek(0)
    # `datasets` writes the stream format.
    open_table = pyarrow.ipc.open_file if is_file_format else pyarrow.ipc.open_stream
    batches = open_table(source).read_all().to_batches(ROWS_PER_BATCH)
    return _number_rows(file, _read_batches(batches))


def _read_batches(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[Any]:
    """The rows of the batches. The error stands for a row whose text is not UTF-8."""
    for batch in batches:
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            for i in range(batch.num_rows):
                try:
                    yield from batch.slice(i, 1).to_pylist()
                except UnicodeDecodeError as error:
                    yield error


_READERS = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
