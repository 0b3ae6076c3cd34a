"""From rows to what the trainers take: prompts for PPO, examples for SFT, DPO and reward models."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from rl2.batch import Sample
from rl2.data.chat import ChatTemplate
from rl2.data.formats import ReadRow, read_pair_row, read_sft_row
from rl2.data.messages import abbreviate
from rl2.data.rows import load_rows
from rl2.progress import mark

ROWS_PER_CHUNK = 1000  # rows tokenised in one call, which fast tokenizers share among threads

Item = TypeVar("Item")
# The text of a conversation up to where a reply begins, and with the reply.
RenderedReply = tuple[str, str]


class RowKind(NamedTuple):
    """What the rows of a trainer are: `read` is of formats.py, `render` gives a row's replies."""

    read: Callable[[dict], ReadRow]
    render: Callable[[ChatTemplate, dict], list[RenderedReply]]


class EpochSampler(Generic[Item]):
    """Items in a fixed order of epochs. `Prompts` and `Examples` are its subclasses.

    `self[i]` is the i-th item in the order of the rows. `take` and `batch` follow the order of
    training, an endless sequence of epochs, each of which holds every item once. Items that are
    longer than `max_length` tokens are dropped: `num_dropped` counts them, `longest` is the length
    of the longest item kept. ValueError when none is kept.

    `lengths` has the number of tokens of each row. A subclass names the items and the key of the
    batch size as messages do.
    """

    item_name: str  # plural
    batch_key: str

    def __init__(
        self,
        lengths: list[int],
        *,
        max_length: int,
        shuffle: bool = False,
        seed: int = 0,
        batch_size: int = 1,
    ):
        token_counts = np.array(lengths)
        self.max_length = max_length
        self.shuffle = shuffle
        self.seed = seed
        self.batch_size = batch_size
        self.kept = np.flatnonzero(token_counts <= max_length)  # indices of rows, ascending
        self.num_dropped = len(token_counts) - len(self.kept)
        if len(self.kept) == 0:
            raise ValueError(
                f"data.max_length={max_length} leaves none of the {len(token_counts)} "
                f"{self.item_name}: the shortest has {token_counts.min()} tokens, the longest "
                f"{token_counts.max()}; raise data.max_length"
            )
        self.longest = int(token_counts[self.kept].max())
        self.rows_done = 0  # the position in training: rows taken so far, over all epochs

    def __getitem__(self, i: int) -> Item:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Item]:
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        return len(self.kept)

    def describe_steps(self, num_steps: int) -> list[str]:
        """How a run of `num_steps` uses the items, in sentences."""
        size = self.batch_size
        epochs = num_steps * size / len(self)
        sentences = [
            f"data: {len(self)} {self.item_name}, {size} a step; steps: {num_steps}; "
            f"epochs: {epochs:.3g}"
        ]
        if size > len(self):
            sentences.append(
                f"{self.batch_key}={size} is more than the {len(self)} {self.item_name}: a step "
                f"repeats them, {size / len(self):.3g} times each on average"
            )
        return sentences

    def describe_dropped(self, split: str) -> list[str]:
        """How many items are too long, in a sentence if there are some.

        `split` stands before their name: "training " or "test ".
        """
        if not self.num_dropped:
            return []
        limit = f"data.max_length={self.max_length}"
        return [f"{self.num_dropped} {split}{self.item_name} are longer than {limit} and dropped"]

    def next_items(self, count: int | None = None) -> list[Item]:
        """The next `count` items of training, by default a batch, and moves the position.

        Batches cross the ends of epochs: 5 items in batches of 2, not shuffled, are 01 23 40 12 34.
        """
        count = self.batch_size if count is None else count
        items = self.take(self.rows_done, count)
        self.rows_done += count
        return items

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"rows_done": self.rows_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows_done = state["rows_done"]

    def take(self, start: int, count: int) -> list[Item]:
        """The items at positions start, ..., start + count - 1 of the endless sequence of epochs.

        They depend on the seed and the positions alone, so a resumed run needs no other state. If
        `count` exceeds the number of items, an item occurs several times.
        """
        return [self._item_at(position) for position in range(start, start + count)]

    def _item_at(self, position: int) -> Item:
        epoch, i = divmod(position, len(self))
        if self.shuffle:
            i = int(_permutation(len(self), self.seed, epoch)[i])
        return self[i]


@dataclass
class Prompt:
    """A prompt of PPO."""

    index: int  # of its row, from 0
    row: dict[str, Any]
    tokens: list[int]


class Prompts(EpochSampler[Prompt]):
    """The tokenised prompts of rows that `read_ppo_row` gave.

    ValueError names a row that the chat template refuses. `progress` shows a bar if tokenising
    takes long: set it on one rank.
    """

    item_name = "prompts"
    batch_key = "data.prompts_per_rollout"

    def __init__(
        self,
        rows: list[dict],
        template: ChatTemplate,
        *,
        max_length: int,
        shuffle: bool = False,
        seed: int = 0,
        batch_size: int = 1,
        progress: bool = False,
    ):
        self.rows = rows
        template.warn_of_ignored(rows)
        self.tokens: list[np.ndarray] = []  # int32: lists of int would take ten times the memory
        for chunk in _chunks(len(rows), "tokenise prompts", progress):
            texts = [_render_prompt(template, index, rows[index]) for index in chunk]
            for tokens in template.tokenize(texts):
                self.tokens.append(np.array(tokens, np.int32))
        super().__init__(
            [len(tokens) for tokens in self.tokens],
            max_length=max_length,
            shuffle=shuffle,
            seed=seed,
            batch_size=batch_size,
        )

    def __getitem__(self, i: int) -> Prompt:
        index = int(self.kept[i])
        return Prompt(index, self.rows[index], self.tokens[index].tolist())


@dataclass
class Example:
    """A row to train on as it is."""

    index: int  # of the row, from 0
    row: dict[str, Any]
    sequences: list[tuple[list[int], list[int]]]  # (tokens, mask) of each; 1 = trained


class Examples(EpochSampler[Example]):
    """The tokenised examples of a data file, a folder or a hub data set, see `load_rows`.

    `kind` reads and renders a row, or raises ValueError for a row that does not suit; the message
    then names its file and row. The length of a row is that of its longest sequence. `progress`
    shows a bar if tokenising takes long: set it on one rank.
    """

    item_name = "rows"
    batch_key = "data.batch_size"

    def __init__(
        self,
        path: str,
        split: str,
        template: ChatTemplate,
        kind: RowKind,
        *,
        max_length: int,
        columns: dict[str, str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        batch_size: int = 1,
        progress: bool = False,
    ):
        replies_by_row: list[list[RenderedReply]] = []

        def read_row(row: dict) -> ReadRow:
            row, notes = kind.read(row)
            replies_by_row.append(kind.render(template, row))
            return row, notes

        self.rows = load_rows(path, split, read_row, columns)
        template.warn_of_ignored(self.rows)
        # (tokens int32, mask int8) of each sequence of each row
        self.sequences: list[list[tuple[np.ndarray, np.ndarray]]] = []
        for chunk in _chunks(len(self.rows), "tokenise rows", progress):
            chunk_replies = [replies_by_row[index] for index in chunk]
            for replies in _tokenize_replies(template, chunk_replies):
                sequences = template.training_sequences(replies)
                self.sequences.append([_to_arrays(*sequence) for sequence in sequences])
        super().__init__(
            [max(len(tokens) for tokens, _ in sequences) for sequences in self.sequences],
            max_length=max_length,
            shuffle=shuffle,
            seed=seed,
            batch_size=batch_size,
        )

    def __getitem__(self, i: int) -> Example:
        index = int(self.kept[i])
        sequences = [(tokens.tolist(), mask.tolist()) for tokens, mask in self.sequences[index]]
        return Example(index, self.rows[index], sequences)


def to_samples(examples: list[Example]) -> list[Sample]:
    """One sample for each sequence of the examples.

    The sequences of an example have one group and one trajectory: the position of the example.
    """
    samples = []
    for position, example in enumerate(examples):
        for tokens, mask in example.sequences:
            zeros = [0.0] * len(tokens)
            samples.append(Sample(tokens, mask, zeros, zeros, group=position, trajectory=position))
    return samples


def render_sft(template: ChatTemplate, row: dict, turns: str = "all") -> list[RenderedReply]:
    """The assistant's replies in `messages`: all of them, or only the last with turns="last".

    With a `completion` the replies are those in it. If `messages` is plain text, all of it is one
    reply. Columns other than `tools` are ignored.
    """
    messages = row["messages"]
    completion = row.get("completion")
    tools = row.get("tools")
    if isinstance(completion, str):
        return [template.render_reply(messages, completion, tools)]
    if isinstance(messages, str):
        if completion:
            raise ValueError("column 'completion': expected text, as the prompt is text")
        return [("", template.render(messages))]
    first = len(messages) if completion else 0
    messages = messages + (completion or [])
    reply_indices = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if turns == "last":
        reply_indices = reply_indices[-1:]
    return [template.render_reply(messages[:i], messages[i], tools) for i in reply_indices]


def render_pair(template: ChatTemplate, row: dict) -> list[RenderedReply]:
    """The replies `chosen` and `rejected` to the prompt `messages`, in this order."""
    messages = row["messages"]
    replies = [row["chosen"], row["rejected"]]
    if isinstance(messages, str) and not all(isinstance(reply, str) for reply in replies):
        raise ValueError("columns 'chosen' and 'rejected': expected texts, as the prompt is text")
    pair = [template.render_reply(messages, reply, row.get("tools")) for reply in replies]
    if pair[0] == pair[1]:
        raise ValueError(
            f"'chosen' and 'rejected' are the same text; remove the row: {abbreviate(replies[0])}"
        )
    return pair


SFT_ROWS = RowKind(read_sft_row, render_sft)
PAIR_ROWS = RowKind(read_pair_row, render_pair)


def _chunks(num_rows: int, description: str, progress: bool) -> Iterator[range]:
    """Ranges of rows to tokenise together, with a progress bar after two seconds."""
    starts = range(0, num_rows, ROWS_PER_CHUNK)
    for start in tqdm(starts, desc=description, delay=2, disable=not progress):
        mark()
        yield range(start, min(start + ROWS_PER_CHUNK, num_rows))


def _render_prompt(template: ChatTemplate, index: int, row: dict) -> str:
    try:
        return template.render(row["messages"], row.get("tools"))
    except ValueError as error:
        raise ValueError(f"row {index} (from 0): {error}") from error


def _tokenize_replies(
    template: ChatTemplate, replies_by_row: list[list[RenderedReply]]
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """The replies of each row with tokens in place of texts. One call tokenises all texts."""
    texts = []
    for replies in replies_by_row:
        for before, whole in replies:
            texts += [before, whole]
    token_lists = iter(template.tokenize(texts))
    for replies in replies_by_row:
        yield [(next(token_lists), next(token_lists)) for _ in replies]


def _to_arrays(tokens: list[int], mask: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(tokens, np.int32), np.array(mask, np.int8)


@lru_cache(maxsize=4)  # a step asks for each of its items, from two epochs at most
def _permutation(num_items: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_items)
