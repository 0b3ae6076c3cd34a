"""Tables of large data: one process of a node builds each on disk, and all of them map it.

The folder is $RL2_CACHE, by default ~/.cache/rl2. It may be deleted while no run is starting. It
holds pickled rows, so nobody else may write there.
"""

import fcntl
import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
import tokenizers
import transformers

from rl2 import progress
from rl2.parallel.rank import is_first_rank

ROWS_PER_BATCH = 1000

Batches = Iterator[pyarrow.RecordBatch]


def table_key(*parts: Any) -> str:
    """The name of a table that depends on the `repr` of `parts`, and on the code of this room."""
    versions = (transformers.__version__, tokenizers.__version__)
    digest = hashlib.sha256(repr((versions, parts)).encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def open_table(
    key: str | None,
    schema: pyarrow.Schema,
    build: Callable[[], Batches],
    title: str,
    num_rows: int | None = None,
) -> pyarrow.Table:
    """The table of the batches of `build()`. With a key it is on disk, and mapped into memory.

    The first process that comes builds it; those that come meanwhile wait. If it dies, the next one
    builds. `title` and `num_rows` are for the bar that the builder shows.
    """
    if key:
        folder = Path(os.environ.get("RL2_CACHE") or "~/.cache/rl2").expanduser()
        file = folder / f"{key}.arrow"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(folder / f"{key}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or the process is gone
                with suppress(OSError, pyarrow.ArrowInvalid):  # not there, or damaged
                    return _map(file)
                _write(file, schema, _with_bar(build(), title, num_rows, True))
                print(f"{title}: kept in {file}")
                return _map(file)
        except OSError as error:  # no space, no right to write, no locks
            reason = f"the cache cannot be used ({error}); set RL2_CACHE to another folder"
            print(f"warning: {title}: every process does it, as {reason}")
    batches = _with_bar(build(), title, num_rows, is_first_rank())
    return pyarrow.Table.from_batches(batches, schema)


def _map(file: Path) -> pyarrow.Table:
    return pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()


def _write(file: Path, schema: pyarrow.Schema, batches: Batches) -> None:
    """Writes the file under another name first: a file that has its name is whole."""
    # The host's name: some file systems lock for the processes of one host only.
    part = file.with_suffix(f".{socket.gethostname()}.part")
    try:
        with open(part, "wb") as sink:
            with pyarrow.ipc.new_file(sink, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            sink.flush()
            os.fsync(sink.fileno())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _with_bar(batches: Batches, title: str, num_rows: int | None, is_shown: bool) -> Batches:
    """The batches, with a bar. Each counts as progress."""
    with progress.Bar(title, num_rows, "rows", is_shown) as bar:
        for batch in batches:
            bar.add(batch.num_rows)
            yield batch
