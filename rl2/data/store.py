"""Tables of rows. One process of a node builds that of large data on disk, and all of them map it.

`datasets` keeps it in $RL2_CACHE, by default ~/.cache/rl2. The folder may be deleted while no run
is starting. It holds pickled rows, so nobody else may write there.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import tokenizers
import transformers

from rl2 import progress
from rl2.parallel.rank import is_first_rank


def table_key(*parts: object) -> str:
    """The name of a table that depends on the `repr` of `parts`, and on the code of this room."""
    versions = (transformers.__version__, tokenizers.__version__)
    digest = hashlib.sha256(repr((versions, parts)).encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def make_table(
    key: str | None,
    build: Callable[[], Iterator[dict]],
    title: str,
    num_rows: int | None = None,
) -> pyarrow.Table:
    """The table of the rows of `build()`. With a key it is on disk, and mapped into memory.

    The first process that comes builds it; those that come meanwhile wait. If it dies, the next one
    builds. `title` and `num_rows` are for the bar that the builder shows. What `build` raises is
    raised; ValueError if the folder cannot be used, or the table in it is damaged.
    """

    def build_with_bar() -> Iterator[dict]:
        with progress.Bar(title, num_rows, "rows", bool(key) or is_first_rank()) as bar:
            for row in build():
                bar.add(1)
                yield row

    if key is None:
        return pyarrow.Table.from_pylist(list(build_with_bar()))
    import datasets  # here, as most data is small
    from datasets.exceptions import DatasetGenerationError

    folder = Path(os.environ.get("RL2_CACHE") or "~/.cache/rl2").expanduser()
    had_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stored = datasets.Dataset.from_generator(
            build_with_bar, cache_dir=str(folder), fingerprint=key
        )
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    except (OSError, pyarrow.ArrowInvalid) as error:  # no right to write, no locks, damage
        remedy = f"delete {folder}, or set RL2_CACHE to another folder"
        raise ValueError(f"{title}: {error}; {remedy}") from error
    finally:
        if had_bars:
            datasets.enable_progress_bars()
    return stored.data.table
