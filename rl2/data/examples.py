"""From rows to what the trainers take: prompts for PPO, examples for SFT, DPO and reward models."""

import hashlib
import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from rl2.batch import Sample
from rl2.data.chat import ChatTemplate
from rl2.data.formats import (
    ReadRow,
    is_pair,
    read_labelled_row,
    read_pair_row,
    read_ppo_row,
    read_sft_row,
)
from rl2.data.messages import Row, abbreviate, is_trained
from rl2.data.probe import find_unshown
from rl2.data.rows import Rows, check_problems
from rl2.data.store import make_table, table_key
from rl2.parallel.rank import print_once

ROWS_PER_BATCH = 1000  # of a call of the tokenizer

# The text of a conversation up to where a reply begins, and with the reply.
RenderedReply = tuple[str, str]
TrainedSequences = list[tuple[list[int], list[int]]]  # (tokens, mask) of each; 1 = trained


class RowKind(NamedTuple):
    """What the rows of a trainer are, and how messages name them."""

    read: Callable[[Row], ReadRow]  # of formats.py
    # The text of a row that is a prompt, or a RenderedReply for each reply that is trained.
    render: Callable[[ChatTemplate, Row], Sequence[tuple[str, ...]]]
    name: str = "rows"
    batch_key: str = "data.batch_size"


@dataclass
class Example:
    """A row with its tokens: a prompt of PPO, or what the other trainers train on."""

    index: int  # of the row, from 0; in a mixture, among the rows of all sources
    row: Row
    sequences: TrainedSequences
    source: str = ""  # the name in data.path.NAME or data.test_path.NAME, if it has one

    @property
    def tokens(self) -> list[int]:
        """The tokens of a prompt."""
        [(tokens, _)] = self.sequences
        return tokens


class Examples:
    """The tokenised rows of a source or a test set, in the order of the rows.

    An example is as long as its longest sequence. Examples longer than `max_length` tokens are
    dropped, and `num_dropped` counts them. ValueError when none is kept, or names rows that cannot
    be rendered.
    """

    def __init__(
        self,
        rows: Rows,
        template: ChatTemplate,
        kind: RowKind,
        *,
        max_length: int,
        source: str = "",
    ):
        self.rows = rows
        self.source = source
        self.template = template
        self.kind = kind
        self._print_unshown()
        key = None
        if rows.key:
            key = table_key(rows.key, pickle.dumps(kind), template.dependencies())
        title = f"tokenise {rows.path}"
        self.table = make_table(key, self._tokenize, title, len(rows))
        self.token_counts = token_counts = self.table["length"].to_numpy()
        self.max_length = max_length
        self.kept = np.flatnonzero(token_counts <= max_length)  # indices of rows, ascending
        self.num_dropped = len(token_counts) - len(self.kept)
        if len(self.kept) == 0:
            raise ValueError(
                f"data.max_length={max_length} leaves none of the {len(token_counts)} "
                f"{kind.name}: the shortest has {token_counts.min()} tokens, the longest "
                f"{token_counts.max()}; raise data.max_length"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest item."""
        return int(self.token_counts[self.kept].max())

    def __getitem__(self, i: int) -> Example:
        index = int(self.kept[i])
        sequences = pickle.loads(self.table["sequences"][index].as_buffer())
        return Example(index, self.rows[index], sequences, self.source)

    def _print_unshown(self) -> None:
        """Prints what the chat template does not show. ValueError names rows that are refused."""
        problems: dict[str, list[str]] = defaultdict(list)
        warnings: dict[str, str] = {}  # and the first row of each
        for form in self.rows.kinds:
            row, location = self.rows[form.first], self.rows.locate(form.first)
            if not isinstance(row["messages"], str):
                self.template.check_exists()
            try:
                for warning in find_unshown(self.template, row, self.kind.render):
                    warnings.setdefault(warning, location)
            except ValueError as error:
                problems[str(error)] += [location] * form.count
        check_problems(self.rows.path, problems)
        print_once(f"{text} (first in {location})" for text, location in warnings.items())

    def _join(self, token_lists: list[list[int]]) -> TrainedSequences:
        """The sequences of a row, from the tokens of its texts."""
        if len(token_lists) == 1:  # a prompt, of which no token is trained
            return [(token_lists[0], [])]
        replies = zip(token_lists[::2], token_lists[1::2], strict=True)
        return self.template.training_sequences(list(replies))

    def _tokenize(self) -> Iterator[dict]:
        """The rows of the table. In the end ValueError lists the rows that are refused."""
        problems: dict[str, list[str]] = defaultdict(list)
        for start in range(0, len(self.rows), ROWS_PER_BATCH):
            texts_by_row = []
            for i in range(start, min(start + ROWS_PER_BATCH, len(self.rows))):
                try:
                    rendered = self.kind.render(self.template, self.rows[i])
                    texts_by_row.append(list(chain.from_iterable(rendered)))
                except ValueError as error:
                    problems[str(error)].append(self.rows.locate(i))
            if problems:
                continue  # only more problems matter now
            # One call tokenises all texts: fast tokenizers share them among threads.
            token_lists = iter(self.template.tokenize(list(chain.from_iterable(texts_by_row))))
            for texts in texts_by_row:
                sequences = self._join(list(islice(token_lists, len(texts))))
                yield {
                    "sequences": pickle.dumps(sequences),
                    "length": max(len(tokens) for tokens, _ in sequences),
                }
        check_problems(self.rows.path, problems)

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        return len(self.kept)

    def describe_dropped(self, split: str) -> list[str]:
        """A warning of how many items are too long, if there are some.

        `split` is put before their name: training or test.
        """
        if not self.num_dropped:
            return []
        num_rows = len(self.token_counts)
        name = " ".join(filter(None, (split, self.source, self.kind.name)))
        return [
            f"warning: {self.num_dropped} of {num_rows} {name} "
            f"({self.num_dropped / num_rows:.0%}) are longer than data.max_length="
            f"{self.max_length} and dropped; the longest has {self.token_counts.max()} tokens: "
            "raise data.max_length"
        ]


def hold_out(sources: dict[str, Examples], ratio: float) -> dict[str, Examples]:
    """Takes a fraction of the items out of the sources, and returns those of each source that has
    some.

    A hash of the messages alone chooses them, by one limit for all sources. So rows with the same
    messages are on one side, whichever order and source they have. ValueError if nothing is left
    of a source.
    """
    hashes = {}
    for name, examples in sources.items():
        hashes[name] = np.array([_hash_messages(examples.rows[i]) for i in examples.kept.tolist()])
    ascending = np.sort(np.concatenate(list(hashes.values())))
    limit = ascending[max(1, round(ratio * len(ascending))) - 1]
    held_out = {}
    for name, examples in sources.items():
        is_taken = hashes[name] <= limit
        if is_taken.all():
            of_source = f" of data.path.{name}" if name else ""
            raise ValueError(
                f"data.test_ratio={ratio} leaves none of the {len(is_taken)} {examples.kind.name}"
                f"{of_source} to train on: lower it, or give more rows with different messages"
            )
        if is_taken.any():
            held_out[name] = copy(examples)
            held_out[name].kept = examples.kept[is_taken]
            held_out[name].num_dropped = 0
            examples.kept = examples.kept[~is_taken]
    return held_out


class Mixture:
    """The training examples of one or several sources, in a fixed order of epochs.

    An epoch holds every example once. The sources alternate as evenly as their numbers of examples
    allow, hence each step has about the same share of each: with 4 examples of `a` and 2 of `b` an
    epoch is abaaba. With `shuffle` each source has an order of its own.

    All of this depends on a position alone, which is all that a checkpoint needs.
    """

    def __init__(
        self,
        sources: Mapping[str, Examples],
        *,
        shuffle: bool = False,
        seed: int = 0,
        batch_size: int = 1,
    ):
        self.sources = list(sources.values())
        self.kind = self.sources[0].kind
        self.batch_size = batch_size
        self.longest = max(source.longest for source in self.sources)
        self.shuffle = shuffle
        # Equally many rows of two sources must not be shuffled alike: they may be in pairs.
        self.seeds = [(seed,) if name == "" else (seed, i) for i, name in enumerate(sources)]
        # Cached, since a step asks for each of its examples; they are of few epochs.
        self.permutation = lru_cache(maxsize=4 * len(sources))(_permutation)
        lengths = [len(source) for source in self.sources]
        # Those of each source are spread evenly over an epoch.
        places = np.concatenate([(np.arange(length) + 0.5) / length for length in lengths])
        order = np.argsort(places, kind="stable")
        # [N] The number of the source at each position, and how many of it come before.
        self.numbers = np.repeat(np.arange(len(lengths)), lengths)[order]
        self.ranks = np.concatenate([np.arange(length) for length in lengths])[order]
        numbers_of_rows = [len(source.rows) for source in self.sources]
        self.first_indices = np.cumsum([0] + numbers_of_rows)

    def __len__(self) -> int:
        return len(self.numbers)

    def at(self, position: int) -> Example:
        """Returns the example at this position of the endless sequence of epochs."""
        epoch, i = divmod(position, len(self))
        number = int(self.numbers[i])
        source = self.sources[number]
        i = int(self.ranks[i])
        if self.shuffle:
            i = int(self.permutation(len(source), self.seeds[number], epoch)[i])
        example = source[i]
        example.index += int(self.first_indices[number])
        return example


def describe_steps(examples: Mixture, num_steps: int) -> list[str]:
    """How a run of `num_steps` uses the examples, in sentences."""
    size, name = examples.batch_size, examples.kind.name
    epochs = num_steps * size / len(examples)
    sentences = [
        f"data: {len(examples)} {name}, {size} a step; steps: {num_steps}; epochs: {epochs:.3g}"
    ]
    if size > len(examples):
        sentences.append(
            f"{examples.kind.batch_key}={size} is more than the {len(examples)} {name}: a "
            f"step repeats them, {size / len(examples):.3g} times each on average"
        )
    for source in examples.sources:
        if source.source:
            share = len(source) / len(examples)
            sentences.append(
                f"data.path.{source.source}: {len(source)} {name}, {share:.3g} of a step"
            )
    return sentences


@dataclass
class DataCursor:
    """How far a run is in its training examples.

    A collector moves it back over prompts whose groups it does not keep.
    """

    examples: Mixture
    position: int = 0
    """examples taken so far, over all epochs"""
    rows_done: int = 0
    """examples of the finished steps: what the length of a run is counted in. Prompts that were
    replaced or taken ahead count in `position` only"""

    def take(self) -> Example:
        """Returns the next example, and moves the position past it."""
        example = self.examples.at(self.position)
        self.position += 1
        return example

    def next_batch(self) -> list[Example]:
        """Returns the examples of a step that uses each one that it takes.

        Batches cross the ends of epochs: 5 items in batches of 2, not shuffled, are 01 23 40 12 34.
        If a batch is larger than the number of items, an item occurs several times.
        """
        batch = [self.take() for _ in range(self.examples.batch_size)]
        self.rows_done = self.position
        return batch

    def state_dict(self) -> dict[str, int]:
        """Returns what a resumed run needs."""
        return {"rows_done": self.rows_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = self.rows_done = state["rows_done"]


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


def render_prompt(template: ChatTemplate, row: Row) -> list[tuple[str]]:
    """The text of `messages` up to where the reply begins."""
    return [(template.render(row["messages"], row.get("tools")),)]


def render_sft(template: ChatTemplate, row: Row) -> list[RenderedReply]:
    """The assistant's replies in `messages`, but for those of weight 0.

    With a `completion` the replies are those in it. If `messages` is plain text, all of it is one
    reply. Columns other than `tools` are ignored.
    """
    messages = row["messages"]
    completion: Any = row.get("completion")
    tools = row.get("tools")
    if isinstance(messages, str) and completion is None:
        return [("", template.render(messages))]
    if isinstance(messages, str) or isinstance(completion, str):
        return [template.render_reply(messages, completion, tools)]
    first = len(messages) if completion else 0
    messages = messages + (completion or [])
    replies = []
    for i in range(first, len(messages)):
        if is_trained(messages[i]):
            replies.append(template.render_reply(messages[:i], messages[i], tools))
    return replies


def render_pair(template: ChatTemplate, row: Row) -> list[RenderedReply]:
    """The replies `chosen` and `rejected` to the prompt `messages`, in this order."""
    chosen = template.render_reply(row["messages"], row["chosen"], row.get("tools"))
    rejected = template.render_reply(row["messages"], row["rejected"], row.get("tools"))
    if chosen == rejected:
        raise ValueError(
            "the chat template writes 'chosen' and 'rejected' as the same text, without what "
            f"distinguishes them: {abbreviate(row['chosen'])}, {abbreviate(row['rejected'])}"
        )
    return [chosen, rejected]


def render_labelled(template: ChatTemplate, row: Row) -> list[RenderedReply]:
    """The reply `completion` to the prompt `messages`, or the two replies of a pair."""
    if is_pair(row):
        return render_pair(template, row)
    return [template.render_reply(row["messages"], row["completion"], row.get("tools"))]


PROMPT_ROWS = RowKind(read_ppo_row, render_prompt, "prompts", "data.prompts_per_rollout")
SFT_ROWS = RowKind(read_sft_row, render_sft)
PAIR_ROWS = RowKind(read_pair_row, render_pair)
LABELLED_ROWS = RowKind(read_labelled_row, render_labelled)


def _hash_messages(row: Row) -> int:
    """A number of 64 bits that depends on the messages of the row."""
    text = json.dumps(row["messages"], sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def _permutation(num_items: int, seed: tuple[int, ...], epoch: int) -> np.ndarray:
    return np.random.default_rng((*seed, epoch)).permutation(num_items)
