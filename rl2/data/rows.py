"""From data files to rows, which are dicts. A malformed row is refused and named, never skipped."""

import csv
import hashlib
import itertools
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import pyarrow
import pyarrow.parquet
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError

from rl2.data.formats import ReadRow, rename_columns
from rl2.data.messages import abbreviate
from rl2.data.store import ROWS_PER_BATCH, open_table, table_key
from rl2.parallel.mesh import is_first_rank

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
MAX_LISTED_PROBLEMS = 5
# Columns that may hold messages as JSON text.
CONVERSATION_COLUMNS = ("messages", "prompt", "conversations", "completion", "chosen", "rejected")
PARSED_COLUMNS = (*CONVERSATION_COLUMNS, "tools")
MAX_NESTING = 100  # levels of lists and objects in a cell: templates and environments recurse
TOO_DEEP = f"nested deeper than {MAX_NESTING} levels: flatten the value, or store it as text"
HUB_TIMEOUT_SECONDS = 10.0
MAX_CSV_CELL_BYTES = 2**31 - 1
LARGE_BYTES = 16 * 2**20  # of data that is worth a table on disk: it takes some ten seconds to read
MISSING_CELL: Any = object()  # the value of a cell that a csv row lacks

# (where the row is, the row as its format gives it: a line of JSON is still text)
LocatedRow = tuple[str, Any]
Source = list[Path] | Any  # data files, or a data set of the hub
ROWS_SCHEMA = pyarrow.schema(
    {
        "row": pyarrow.large_binary(),  # pickled: JSON lacks some values that columns may have
        "location": pyarrow.string(),
    }
)


def load_rows(
    path: str,
    split: str = "train",
    read: Callable[[dict], ReadRow] | None = None,
    columns: dict[str, str] | None = None,
    limit: int | None = None,
) -> "Rows":
    """The rows of a data file, of a folder of data files, or of a data set of the hub.

    A file is json (a list, or lines), jsonl, csv, parquet or arrow. A folder gives the rows of its
    files in the order of their names. If it has a sub-folder called `split`, or files whose names
    begin with `split` (train.jsonl, train-00000.parquet), only those are read. The name of a hub
    data set may end in a configuration and in a split that is read in place of `split`:
    openai/gsm8k:main@train.

    In every format `messages`, other columns of conversations and `tools` may be JSON text, as they
    are in csv. Other text in `messages` is a plain prompt. All other cells of a csv file stay text.

    `columns` renames columns, see `rename_columns`. `read(row)` is one of formats.py: it raises
    ValueError for a row that does not suit. All rows, or the first `limit`, are read; then
    ValueError lists the first problems, each with its file, row and column. Rows are counted by
    the lines of a jsonl or csv file, from 1 in other formats. The first process prints, once, how
    rows were read that are not in rl2's own form.
    """
    columns = columns or {}
    source = _find_source(path, split)
    key = None
    if fingerprint := "" if limit else _fingerprint(path, split, source):
        key = table_key(path, fingerprint, pickle.dumps(read), sorted(columns.items()))

    def build() -> Iterator[pyarrow.RecordBatch]:
        raw_rows = itertools.islice(_read_rows(path, source), limit)
        return _check_rows(path, raw_rows, read, columns)

    rows = Rows(open_table(key, ROWS_SCHEMA, build, f"read {path}"), path, key)
    if not rows:
        raise ValueError(f"{path} has no rows (split {split})")
    if is_first_rank():
        for note, (number, location) in rows.notes.items():
            print(f"{note} ({number} of {len(rows)} rows, first {location})", flush=True)
    return rows


class Rows(Sequence[dict]):
    """Rows that were read and checked. They are packed, and unpacked when asked for.

    Rows of one kind have the same columns, and text or messages, with or without tools. `kinds` has
    (the first row, the number of rows) of each kind, `notes` (the number of rows, where the first
    one is) of each note. `key` is the name of the table on disk; None if it is in memory.
    """

    def __init__(self, table: pyarrow.Table, path: str, key: str | None):
        self.path = path
        self.key = key
        self.kinds: list[list[int]]
        self.notes: dict[str, list]
        summary = table["row"][-1]  # behind the rows
        self.kinds, self.notes = pickle.loads(summary.as_buffer())
        self.table = table.slice(0, len(table) - 1)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: Any) -> Any:
        return pickle.loads(self.table["row"][i].as_buffer())

    def locate(self, i: int) -> str:
        """The file and the number of a row, for messages."""
        return self.table["location"][i].as_py()


def pack_rows(rows: Iterable[dict]) -> Rows:
    """Rows that Python code has made."""
    path = "the data"
    batches = _check_rows(path, _number_rows(path, rows), None, {})
    return Rows(pyarrow.Table.from_batches(batches, ROWS_SCHEMA), path, None)


def hash_data(path: str, split: str = "train") -> str:
    """A hash of the files that `load_rows` reads.

    "" if there are none: a data set of the hub is known by its name.
    """
    local_path = Path(path).expanduser()
    if not local_path.exists():
        return ""
    digest = hashlib.sha256()
    for file in _find_files(local_path, split):
        status = file.stat()
        digest.update(_hash_file(file, status.st_size, status.st_mtime_ns))
    return digest.hexdigest()


@cache  # the run folder and the cache of the rows both ask at the start, for the same files
def _hash_file(file: Path, num_bytes: int, changed_at: int) -> bytes:
    """The SHA-256 of a file. Its size and its time of change are for the cache."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _fingerprint(path: str, split: str, source: Source) -> str:
    """What large data is known by. "" for small data, which every process reads anew."""
    if isinstance(source, list):
        is_large = sum(file.stat().st_size for file in source) >= LARGE_BYTES
        return hash_data(path, split) if is_large else ""
    return source._fingerprint if source.data.nbytes >= LARGE_BYTES else ""


def _check_rows(
    path: str,
    raw_rows: Iterator[LocatedRow],
    read: Callable[[dict], ReadRow] | None,
    columns: dict[str, str],
) -> Iterator[pyarrow.RecordBatch]:
    """The rows and their summary in batches. In the end ValueError lists the malformed rows."""
    problems = Problems(path)
    kinds: dict[tuple, list[int]] = {}
    all_notes: dict[str, list] = {}
    index = 0
    while chunk := list(itertools.islice(raw_rows, ROWS_PER_BATCH)):
        packed = []
        for location, raw_row in chunk:
            try:
                row = _parse_row(raw_row, columns)
                row, notes = read(row) if read else (row, [])
            except ValueError as error:
                problems.add(error, location)
                continue
            kind = (*row, isinstance(row.get("messages"), str), bool(row.get("tools")))
            kinds.setdefault(kind, [index, 0])[1] += 1
            for note in notes:
                all_notes.setdefault(note, [0, location])[0] += 1
            packed.append({"row": pickle.dumps(row), "location": location})
            index += 1
        yield pyarrow.RecordBatch.from_pylist(packed, ROWS_SCHEMA)
    problems.check()
    summary = {"row": pickle.dumps((list(kinds.values()), all_notes))}
    yield pyarrow.RecordBatch.from_pylist([summary], ROWS_SCHEMA)


class Problems:
    """What is wrong with rows, and with which ones."""

    def __init__(self, path: str):
        self.path = path
        self.locations: dict[str, list[str]] = {}  # by what is wrong

    def add(self, error: ValueError, location: str) -> None:
        self.locations.setdefault(str(error), []).append(location)

    def check(self) -> None:
        """ValueError with the first problems, each with its first row and the number of others."""
        if not self.locations:
            return
        num_rows = sum(len(locations) for locations in self.locations.values())
        lines = [f"malformed rows in {self.path} ({num_rows}):"]
        listed = itertools.islice(self.locations.items(), MAX_LISTED_PROBLEMS)
        for problem, (first, *others) in listed:
            lines.append(f"{first}: {problem}" + (f" ({len(others)} more rows)" if others else ""))
        if len(self.locations) > MAX_LISTED_PROBLEMS:
            lines.append(f"... and {len(self.locations) - MAX_LISTED_PROBLEMS} other problems")
        raise ValueError("\n".join(lines))


def _parse_row(raw_row: Any, columns: dict[str, str]) -> dict:
    """The row with its columns renamed, and JSON text of messages and tools parsed, without nulls.

    Columnar files give each struct the keys of all structs, with null for those it lacks. Chat
    templates only ask whether a key exists.
    """
    if isinstance(raw_row, UnicodeDecodeError):
        raise raw_row
    row = _parse_json(raw_row, "row") if isinstance(raw_row, str) else raw_row
    if not isinstance(row, dict):
        raise ValueError(
            f"expected a JSON object, got {abbreviate(row)}; write a conversation as "
            '{"messages": [...]}'
        )
    if None in row:  # where csv.DictReader puts the cells that have no column
        raise ValueError("expected a cell for each column of the header, got more")
    if MISSING_CELL in row.values():
        raise ValueError("expected a cell for each column of the header, got fewer")
    row = rename_columns(row, columns)
    for column, value in row.items():
        is_parsed = column in PARSED_COLUMNS
        value = _parse_cell(value, column) if is_parsed else value
        _check_value([column, value], column)
        row[column] = _drop_nulls(value) if is_parsed else value
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
        return _load_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: expected JSON ({error}), got {abbreviate(text)}") from error


def _load_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_to_object)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


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
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_value(item, column, level + 1)


def _to_object(pairs: list[tuple[str, Any]]) -> dict:
    """A JSON object. ValueError if a key occurs twice, of which json keeps the last."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} occurs twice in one object")
    return value


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return value


def _find_source(path: str, split: str) -> Source:
    """The data files, or the data set of the hub. ValueError if there is neither."""
    local_path = Path(path).expanduser()
    if local_path.exists():
        return _find_files(local_path, split)
    if local_path.suffix in SUFFIXES or path.startswith(("/", ".", "~")):
        raise ValueError(f"data path {path}: no such file or folder")
    return _load_from_hub(path, split)


def _read_rows(path: str, source: Source) -> Iterator[LocatedRow]:
    if not isinstance(source, list):
        yield from _number_rows(path, source)
        return
    for file in source:
        if file.suffix not in SUFFIXES:
            raise ValueError(
                f"data path {file}: expected a file that ends in one of {', '.join(SUFFIXES)}"
            )
        try:
            yield from _READERS[file.suffix](file)
        except (ValueError, csv.Error) as error:  # of decoding, of JSON, of pyarrow
            raise ValueError(f"{file} is not a readable {file.suffix[1:]} file: {error}") from error


def _load_from_hub(path: str, split: str) -> Any:
    """The rows of NAME, NAME:CONFIGURATION or either with @SPLIT, which replaces `split`."""
    from datasets import config, load_dataset  # slow to import, and not needed for files

    data_set, _, named_split = path.partition("@")
    name, _, configuration = data_set.partition(":")
    try:
        if not Path(config.HF_DATASETS_CACHE, name.replace("/", "___")).exists():
            _ask_hub(name)
        return load_dataset(name, configuration or None, split=named_split or split)
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


def _find_files(path: Path, split: str) -> list[Path]:
    """The file, or the data files of the split in a folder. ValueError if a folder has none."""
    if not path.is_dir():
        return [path]
    folder = path / split if (path / split).is_dir() else path
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
                yield from _number_rows(file, _load_json(text))
                return
            lines.seek(0)
        for location, line in _number_rows(file, lines):
            if line.strip():
                yield location, line.rstrip("\n")


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
