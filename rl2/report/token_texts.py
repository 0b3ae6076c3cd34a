"""Saved tokens of rollouts: their texts, and what training knew of each of them."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

NO_TRAJECTORY = -1  # of tokens that were not sampled
MOST_TOKENS = 4  # of a character: it has at most four bytes


def find_tokenizer(folder: Path, config: Any) -> Any:
    """That of the final model of a run, or of its actor; None if neither is on this machine."""
    from transformers import AutoTokenizer  # slow to import, and few reports need it

    model = folder / "model"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return AutoTokenizer.from_pretrained(
            model if model.exists() else config["actor"]["model_name"],
            local_files_only=True,
            trust_remote_code=False,  # it would ask on the terminal
        )
    return None


def split_text(decode: Callable[[tuple[int, ...]], str], ids: list[int]) -> list[str]:
    """Returns the text of each token. Of the tokens of one character only the last has it."""
    texts = []
    pending: tuple[int, ...] = ()
    for token in ids:
        pending = (*pending, token)
        text = decode(pending)
        is_whole = "\ufffd" not in text or len(pending) == MOST_TOKENS
        texts.append(text if is_whole else "")
        pending = () if is_whole else pending
    return texts


class SavedTokens:
    """The tokens of a step, in a file that trainer.save_tokens wrote.

    ValueError if the file cannot be read.
    """

    def __init__(self, path: Path, tokenizer: Any):
        try:
            self.columns = columns = load_file(path)
            owners = np.repeat(columns["trajectory"], columns["length"])
            self.owners = np.where(columns["mask"] == 1, owners, NO_TRAJECTORY)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error!r})") from error
        if "trainer_logps" in columns:
            columns["gap"] = abs(columns["logps"] - columns["trainer_logps"])
        # Some decoders strip the space before the first token, so this one comes first.
        first = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self.decode = cache(lambda ids: tokenizer.decode([*first, *ids])[1:])

    def add_to(self, messages: list[dict], trajectory: int) -> None:
        """Gives the trajectory's turns their `tokens`: texts, advantages, and as `gap` the distance
        of the engine's and the trainer's log-probability, as far as these were saved.

        A turn that its tokens do not spell, since it was cut or parsed, gets none.
        """
        is_sampled = self.owners == trajectory
        edges = np.flatnonzero(np.diff(is_sampled, prepend=False, append=False)).reshape(-1, 2)
        replies = [message for message in messages if message.get("role") == "assistant"]
        for message, (start, end) in zip(reversed(replies), reversed(edges), strict=False):
            texts = split_text(self.decode, self.columns["tokens"][start:end].tolist())
            if str(message.get("content")).strip() in "".join(texts):
                message["tokens"] = {"text": texts}
                for name in self.columns.keys() & {"advantages", "gap"}:
                    message["tokens"][name] = self.columns[name][start:end].tolist()
