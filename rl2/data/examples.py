"""Rows -> prompts and training examples. What is wrong with the user's data is named and refused, or counted; nothing
passes in silence."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from tqdm import tqdm

from rl2.batch import Sample
from rl2.data import chat
from rl2.data.rows import _check_prompt, _show, _text, check_messages, load_rows

CHUNK = 1000  # rows tokenised in one call, which fast tokenizers share out over threads


def render_sft(tokenizer, row: dict, turns: str = "all") -> list[tuple[str, str]]:
    """(text before, text with it) of each of the assistant's `turns` (all | last) in `messages`. Text in `messages`, or
    in a column `text`, is trained whole. ValueError if the row does not suit; other columns but `tools` are ignored."""
    if row.get("messages") is None and "text" in row:
        row = {"messages": _text(row, "text")}
    check_messages(row)
    messages = row["messages"]
    if isinstance(messages, str):
        return [("", chat.render(tokenizer, messages))]
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise ValueError(
            "column 'messages': no message of the assistant to train on; add one, or remove the row"
        )
    places = places if turns == "all" else places[-1:]
    return [
        chat.render_reply(tokenizer, messages[:i], messages[i], row.get("tools")) for i in places
    ]


def render_pair(tokenizer, row: dict) -> list[tuple[str, str]]:
    """(text of the prompt `messages`, text with the reply) for `chosen` and for `rejected`, and a look at `margin`, a
    number that may be there. ValueError if the row does not suit."""
    check_messages(row)
    _check_prompt(row["messages"])
    texts = [_text(row, column) for column in ("chosen", "rejected")]
    margin(row)
    pair = [chat.render_reply(tokenizer, row["messages"], text, row.get("tools")) for text in texts]
    if pair[0] == pair[1]:
        raise ValueError(
            f"'chosen' and 'rejected' are the same text; remove the row: {_show(texts[0])}"
        )
    return pair


def margin(row: dict) -> float:
    """By how much the row says that chosen is better: its column `margin`; 0 without one."""
    try:
        return float(row.get("margin") or 0)
    except (TypeError, ValueError):
        raise ValueError(
            f"column 'margin': expected a number, got {_show(row['margin'])}"
        ) from None


class EpochSampler:
    """Items of at most `max_length` tokens in a fixed order: `self[i]` in the order of the rows, `batch(step)` in that of
    training. Longer ones are dropped and counted in `num_dropped`; ValueError when none is left."""

    def _order(self, lengths, max_length, shuffle, seed, batch_size, what):
        lengths = np.array(lengths)
        self.shuffle, self.seed, self.batch_size = shuffle, seed, batch_size
        self.kept = np.flatnonzero(lengths <= max_length)
        self.num_dropped = len(lengths) - len(self.kept)
        if len(self.kept) == 0:
            raise ValueError(
                f"data.max_length={max_length} leaves none of the {len(lengths)} {what}: the shortest has "
                f"{lengths.min()} tokens, the longest {lengths.max()}; raise data.max_length"
            )
        self.longest = int(lengths[self.kept].max())

    def __len__(self) -> int:
        return len(self.kept)

    def num_steps(self, n_epochs: int) -> int:
        """Whole batches in `n_epochs`, at least one."""
        return max(1, n_epochs * len(self) // self.batch_size)

    def batch(self, step: int) -> list:
        """Items of step 0, 1, ...: a function of the seed and the step alone, so that resuming needs nothing else.

        Epochs follow each other without a gap: 5 items in batches of 2, not shuffled, are 01 23 40 12 34. A batch
        that is larger than the data holds an item several times.
        """
        return [
            self._at(position)
            for position in range(step * self.batch_size, (step + 1) * self.batch_size)
        ]

    def _at(self, position: int):
        epoch, i = divmod(position, len(self))
        return self[int(_permutation(len(self), self.seed, epoch)[i]) if self.shuffle else i]


@dataclass
class Prompt:
    index: int  # of the row, from 0
    row: dict
    tokens: list[int]


class Prompts(EpochSampler):
    """Tokenised prompts. Raises ValueError when the chat template refuses a row. `progress` shows a bar when it takes
    long: set it on one rank."""

    def __init__(self, rows, tokenizer, max_length, shuffle, seed, batch_size, progress=False):
        self.rows = rows
        self.tokens = []  # int32 arrays: lists of int would take ten times the memory
        for start in tqdm(
            range(0, len(rows), CHUNK), desc="tokenise prompts", delay=2, disable=not progress
        ):
            texts = [
                _render(tokenizer, i, rows[i]) for i in range(start, min(start + CHUNK, len(rows)))
            ]
            self.tokens += [
                np.array(tokens, np.int32) for tokens in chat.tokenize(tokenizer, texts)
            ]
        self._order(
            [len(tokens) for tokens in self.tokens],
            max_length,
            shuffle,
            seed,
            batch_size,
            "prompts",
        )

    def __getitem__(self, i: int) -> Prompt:
        index = int(self.kept[i])
        return Prompt(index, self.rows[index], self.tokens[index].tolist())


@dataclass
class Example:
    index: int  # of the row, from 0
    row: dict
    sequences: list[tuple[list[int], list[int]]]  # tokens and mask of each


class Examples(EpochSampler):
    """Rows to train on as they are. `render(tokenizer, row)` gives the texts of a row's replies or refuses it with a
    ValueError, which names file and row; the row's length is that of its longest sequence."""

    def __init__(
        self, path, split, tokenizer, render, max_length, shuffle, seed, batch_size, progress=False
    ):
        texts = []
        self.rows = load_rows(path, split, lambda row: texts.append(render(tokenizer, row)))
        self.sequences, specials = [], chat.special_ids(tokenizer)
        for start in tqdm(
            range(0, len(texts), CHUNK), desc="tokenise rows", delay=2, disable=not progress
        ):
            part = texts[start : start + CHUNK]
            flat = [text for replies in part for reply in replies for text in reply]
            tokens = iter(chat.tokenize(tokenizer, flat))
            for replies in part:
                found = chat.sequences(
                    tokenizer, [(next(tokens), next(tokens)) for _ in replies], specials
                )
                self.sequences.append(
                    [(np.array(ids, np.int32), np.array(mask, np.int8)) for ids, mask in found]
                )
        lengths = [max(len(ids) for ids, _ in row) for row in self.sequences]
        self._order(lengths, max_length, shuffle, seed, batch_size, "rows")

    def __getitem__(self, i: int) -> Example:
        index = int(self.kept[i])
        return Example(
            index, self.rows[index], [(x.tolist(), y.tolist()) for x, y in self.sequences[index]]
        )


def to_samples(examples: list[Example]) -> list[Sample]:
    """The sequences of all examples; those of one are a group, numbered by its place, and one trajectory."""
    return [
        Sample(tokens, mask, [0.0] * len(tokens), [0.0] * len(tokens), number, number)
        for number, example in enumerate(examples)
        for tokens, mask in example.sequences
    ]


def _render(tokenizer, index, row) -> str:
    try:
        return chat.render(tokenizer, row["messages"], row.get("tools"))
    except ValueError as error:
        raise ValueError(f"row {index} (from 0): {error}") from error


@lru_cache(maxsize=4)  # a step asks for each of its prompts, of two epochs at most
def _permutation(n, seed, epoch):
    return np.random.default_rng((seed, epoch)).permutation(n)
