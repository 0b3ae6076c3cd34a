"""From data files to rows, which are dicts. A malformed row is refused and named, never skipped."""

import csv
import hashlib
import itertools
import json
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pyarrow
import pyarrow.parquet

from rl2.data.formats import CONVERSATIONS, ReadRow, rename_columns
from rl2.data.messages import CONVERSATION_COLUMNS, Message, Row, abbreviate, describe_form
from rl2.data.store import make_table, table_key
from rl2.parallel.rank import is_first_rank

MAX_LISTED_PROBLEMS = 5
# Columns that may be JSON text: conversations and tools.
PARSED_COLUMNS = set(CONVERSATIONS + CONVERSATION_COLUMNS + ("tools",))
DATASETS_FILES = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
MAX_CSV_CELL_BYTES = 2**31 - 1
LARGE_BYTES = 16 * 2**20  # of data that is worth a table on disk: it takes some ten seconds to read
MISSING_CELL: Any = object()  # the value of a cell that a csv row lacks


# A row as its format gives it: a line of JSON is still text, a row of a columnar file a slice.
RawRow = object
NumberedRow = tuple[int, RawRow]  # (its number in the file, the row)
LocatedRow = tuple[str, RawRow]  # (its file and number, the row)
Source = list[Path] | Any  # data files, or a data set of the hub


def load_rows(
    path: str,
    split: str = "train",
    read: Callable[[Row], ReadRow] | None = None,
    columns: dict[str, str] | None = None,
) -> "Rows":
    """The rows of a data file, of a folder of data files, or of a data set of the hub.

    A file is json (a list, or lines), jsonl, csv, parquet or arrow. A folder gives the rows of its
    files in the order of their names. If it has a sub-folder called `split`, or files whose names
    begin with `split` (train.jsonl, train-00000.parquet), only those are read. The name of a hub
    data set may end in a configuration and in a split that is read in place of `split`:
    openai/gsm8k:main@train.

    `tools`, and a list of messages in a column of conversations, may be JSON text, as in csv. Other
    text is plain text. All other cells of a csv file stay text.

    `columns` renames columns, see `rename_columns`. `read(row)` is one of formats.py: it raises
    ValueError for a row that does not suit. After all rows ValueError lists the first problems,
    each with its file, row and column. Rows are counted by the lines of a jsonl or csv file, from 1
    in other formats. The first process prints, once, how rows were read that are not in rl2's own
    form.
    """
    columns = columns or {}
    source = _find_source(path, split)
    key = None
    if fingerprint := _fingerprint(source):
        key = table_key(path, fingerprint, pickle.dumps(read), sorted(columns.items()))

    def build() -> Iterator[dict]:
        is_hub = not isinstance(source, list)
        return check_rows(path, _read_rows(path, source), read, columns, is_hub)

    rows = Rows(make_table(key, build, f"read {path}"), path, key)
    if not rows:
        raise ValueError(f"{path} has no rows (split {split})")
    if is_first_rank():
        for note, about in rows.notes.items():
            print(f"{note} ({about.count} of {len(rows)} rows, first {rows.locate(about.first)})")
    return rows


@dataclass
class Alike:
    """Rows that have something in common."""

    first: int  # the index of the first one
    count: int = 0


class Rows:
    """Rows that were read and checked. They are packed, and unpacked when asked for.

    `kinds` has the rows of each form, see `describe_form`, `notes` those that a note is about.
    `key` is the name of the table on disk; None if it is in memory.
    """

    def __init__(self, table: pyarrow.Table, path: str, key: str | None):
        self.path = path
        self.key = key
        self.kinds: list[Alike]
        self.notes: dict[str, Alike]
        summary = table["row"][-1]  # after the rows
        self.kinds, self.notes = pickle.loads(summary.as_buffer())
        self.table = table.slice(0, len(table) - 1)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> Row:
        return pickle.loads(self.table["row"][i].as_buffer())

    def locate(self, i: int) -> str:
        """The file and the number of a row, for messages."""
        return self.table["location"][i].as_py()


def hash_sources(paths: Mapping[str, str]) -> str:
    """A hash of the training files of all sources, by key. "" if those of one are not known."""
    if list(paths) == ["data.path"]:
        return hash_data(paths["data.path"])
    hashes = {key: hash_data(path) for key, path in paths.items()}
    if not all(hashes.values()):
        return ""
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()


def hash_data(path: str) -> str:
    """A hash of the training files that `load_rows` reads.

    "" if there are none: a data set of the hub is known by its name, and an evaluation has no
    training rows.
    """
    local_path = Path(path).expanduser()
    if not path or not local_path.exists():
        return ""
    digest = hashlib.sha256()
    for file in _find_files(local_path, "train"):
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _fingerprint(source: Source) -> str:
    """What large data is known by. "" for small data, which every process reads again."""
    if not isinstance(source, list):
        return source._fingerprint if source.data.nbytes >= LARGE_BYTES else ""
    statuses = [file.stat() for file in source]
    if sum(status.st_size for status in statuses) < LARGE_BYTES:
        return ""
    changes = [(status.st_size, status.st_mtime_ns) for status in statuses]
    return repr(list(zip(map(str, source), changes, strict=True)))


def check_rows(
    path: str,
    located_rows: Iterable[LocatedRow],
    read: Callable[[Row], ReadRow] | None,
    columns: dict[str, str],
    is_hub: bool,
) -> Iterator[dict]:
    """The rows of the table, and a last one with their summary.

    In the end ValueError lists the malformed rows.
    """
    problems: dict[str, list[str]] = defaultdict(list)
    kinds: dict[tuple, Alike] = {}
    all_notes: dict[str, Alike] = {}
    index = 0
    for location, raw_row in located_rows:
        try:
            row = rename_columns(_unpack_row(raw_row), columns)
            row = _parse_row(row, is_hub or isinstance(raw_row, pyarrow.RecordBatch))
            row, notes = read(row) if read else (row, [])
            pickled = pickle.dumps(row)
        except (ValueError, RecursionError) as error:  # the latter of a value that is deep
            problems[str(error)].append(location)
            continue
        kinds.setdefault(describe_form(row), Alike(index)).count += 1
        for note in notes:
            all_notes.setdefault(note, Alike(index)).count += 1
        yield {"row": pickled, "location": location}
        index += 1
    check_problems(path, problems)
    yield {"row": pickle.dumps((list(kinds.values()), all_notes)), "location": ""}


def check_problems(path: str, problems: dict[str, list[str]]) -> None:
    """ValueError if there are problems: the first ones, each with its first row and their number.

    `problems` has the files and numbers of the rows by what is wrong with them.
    """
    if not problems:
        return
    num_rows = sum(map(len, problems.values()))
    lines = [f"malformed rows in {path} ({num_rows}):"]
    for problem, (first, *others) in itertools.islice(problems.items(), MAX_LISTED_PROBLEMS):
        lines.append(f"{first}: {problem}" + (f" ({len(others)} more rows)" if others else ""))
    if len(problems) > MAX_LISTED_PROBLEMS:
        lines.append(f"... and {len(problems) - MAX_LISTED_PROBLEMS} other problems")
    raise ValueError("\n".join(lines))


def _parse_row(row: Row, is_columnar: bool) -> Row:
    """The row with JSON text of conversations and tools parsed. ValueError for broken text."""
    parsed = {}
    for column, value in row.items():
        if column in PARSED_COLUMNS:
            if isinstance(value, str) and column == "tools":
                value = _parse_json(value or "null", "column 'tools'")
            elif isinstance(value, str):
                value = _parse_messages(value, column)
            elif is_columnar:
                value = _drop_nested_nulls(value)
        _check_unicode(column, value)
        parsed[column] = value
    return parsed


def _unpack_row(row: RawRow) -> Row:
    if isinstance(row, str):
        row = _parse_json(row, "row")
    elif isinstance(row, pyarrow.RecordBatch):
        [row] = row.to_pylist()  # a ValueError for text that is not UTF-8
    if not isinstance(row, dict):
        raise ValueError(
            f"expected a JSON object, got {abbreviate(row)}; write a conversation as "
            '{"messages": [...]}'
        )
    if None in row:  # where csv.DictReader puts the cells that have no column
        raise ValueError("expected a cell for each column of the header, got more")
    if MISSING_CELL in row.values():
        raise ValueError("expected a cell for each column of the header, got fewer")
    return row


def _parse_messages(text: str, column: str) -> str | list[Message]:
    """The list of messages that a text is in JSON; any other text as it is.

    ValueError for JSON with an error in a column that is named after messages.
    """
    if not re.match(r"\s*\[\s*\{", text):
        return text
    try:
        value = _parse_json(text, f"column '{column}'")
    except ValueError:
        if column in ("messages", "conversations"):
            raise
        return text
    is_conversation = isinstance(value, list) and all(
        isinstance(message, dict) and message.keys() & {"role", "from"} for message in value
    )
    return value if is_conversation else text


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_to_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: expected JSON ({error}), got {abbreviate(text)}") from error


def _to_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object. ValueError if a key occurs twice, of which json keeps the last."""
    value: dict[str, object] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"key {key!r} occurs twice in one object")
        value[key] = item
    return value


def _drop_nested_nulls(value: object) -> object:
    """The value, in which objects lose the keys whose value is null.

    Columnar data give each object the keys of all objects, with null for those it lacks.
    """
    if isinstance(value, list):
        return [_drop_nested_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _drop_nested_nulls(item) for key, item in value.items() if item is not None}
    return value


def _check_unicode(column: str, value: object) -> None:
    """ValueError for text that UTF-8 cannot hold.

    Such text has lone surrogates: halves of a pair, or bytes of a file that is not in UTF-8.
    Tokenizers refuse it, and no process could write it.
    """
    try:
        # Bytes, dates and so on have no text.
        text = json.dumps(
            [column, value], ensure_ascii=False, default=lambda _: None, skipkeys=True
        )
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"column {column!r}: {error}; save the file as UTF-8, or remove the character: "
            f"{abbreviate(value)}"
        ) from None


def _find_source(path: str, split: str) -> Source:
    """The data files, or the data set of the hub. ValueError if there is neither."""
    local_path = Path(path).expanduser()
    if local_path.exists():
        return _find_files(local_path, split)
    if local_path.suffix in READERS or path.startswith(("/", ".", "~")):
        raise ValueError(f"{path}: no such file or folder")
    return _load_from_hub(path, split)


def _read_rows(path: str, source: Source) -> Iterator[LocatedRow]:
    if not isinstance(source, list):
        for number, row in enumerate(source, 1):
            yield f"{path}, row {number}", row
        return
    for file in source:
        if file.suffix not in READERS:
            raise ValueError(f"{file}: expected a file that ends in one of {', '.join(READERS)}")
        try:
            for number, row in READERS[file.suffix](file):
                yield f"{file}, row {number}", row
        except (ValueError, RecursionError, csv.Error) as error:  # of decoding, JSON, pyarrow
            raise ValueError(f"{file} is not a readable {file.suffix[1:]} file: {error}") from error


def _load_from_hub(path: str, split: str) -> Any:
    """The rows of NAME, NAME:CONFIGURATION or either with @SPLIT, which replaces `split`."""
    # Slow to import, and not needed for files.
    from datasets import disable_progress_bars, load_dataset

    data_set, _, named_split = path.partition("@")
    name, _, configuration = data_set.partition(":")
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return load_dataset(name, configuration or None, split=named_split or split)
    except Exception as error:  # of the network, or of an unknown name, configuration or split
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path}: no such file or folder here, and the hub says: {reason}"
        ) from error


def _find_files(path: Path, split: str) -> list[Path]:
    """The file, or the data files of the split in a folder. ValueError if a folder has none."""
    if not path.is_dir():
        return [path]
    folder = path / split if (path / split).is_dir() else path
    # `save_to_disk` of datasets writes descriptions in JSON beside the rows.
    files = sorted(
        file
        for file in folder.iterdir()
        if file.suffix in READERS and file.name not in DATASETS_FILES
    )
    if not files:
        raise ValueError(
            f"{folder}: this folder has no file that ends in one of {', '.join(READERS)}"
        )
    of_split = [file for file in files if re.match(rf"{re.escape(split)}[-_.]", file.name)]
    return of_split or files


def _open_text(file: Path, newline: str) -> TextIO:
    """The text of a file. Bytes that are not UTF-8 become lone surrogates, see `_check_unicode`."""
    return open(file, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _read_json(file: Path) -> Iterator[NumberedRow]:
    # Only a line feed ends a line: JSON strings may hold other characters that end lines.
    with _open_text(file, newline="\n") as lines:
        if file.suffix == ".json":
            text = lines.read()
            if text.lstrip().startswith("["):
                yield from enumerate(_parse_json(text, "list of rows"), 1)
                return
            lines.seek(0)
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _read_csv(file: Path) -> Iterator[NumberedRow]:
    csv.field_size_limit(MAX_CSV_CELL_BYTES)  # the default is 128 KiB
    with _open_text(file, newline="") as lines:
        reader = csv.DictReader(lines, restval=MISSING_CELL)
        first_line = 2  # a row may span several lines: the first of them names it
        for row in reader:
            yield first_line, row
            first_line = reader.line_num + 1


def _read_parquet(file: Path) -> Iterator[NumberedRow]:
    with pyarrow.parquet.ParquetFile(file) as source:
        yield from _number_slices(source.iter_batches())


def _read_arrow(file: Path) -> Iterator[NumberedRow]:
    source = pyarrow.memory_map(str(file))
    try:
        reader = pyarrow.ipc.open_file(source)
    except pyarrow.ArrowInvalid:  # the stream format, which `datasets` writes
        reader = pyarrow.ipc.open_stream(source)
    return _number_slices(reader.read_all().to_batches())


def _number_slices(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[NumberedRow]:
    """Each row as a batch of its own, so that text that is not UTF-8 concerns its row only."""
    slices = (batch.slice(i, 1) for batch in batches for i in range(batch.num_rows))
    return enumerate(slices, 1)


READERS: dict[str, Callable[[Path], Iterable[NumberedRow]]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
