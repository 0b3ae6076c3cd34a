"""This process among those of the job, as torchrun says. Imports no torch."""

import os
from collections.abc import Iterable


def is_first_rank() -> bool:
    """Whether this is rank 0; also before `init_distributed`."""
    return os.environ.get("RANK", "0") == "0"


def print_once(sentences: Iterable[str]) -> None:
    """The first process prints the sentences, one a line."""
    for sentence in sentences if is_first_rank() else []:
        print(sentence)
