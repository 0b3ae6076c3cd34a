"""The data of a rollout: trajectories, and the groups of them that share a prompt."""

import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

import numpy as np

from rl2.batch import Sample
from rl2.data.examples import Example
from rl2.run.success import score_of

MAX_RECORDED_CHARACTERS = 2000  # of a column of a row, in the records


class FinishReason(StrEnum):
    """How a trajectory ended. The values are those of the records."""

    PLAYING = ""
    """it has not ended, or its rewards are missing; never recorded"""
    STOP = "stop"
    """its last turn ended by itself"""
    LENGTH = "length"
    """a length limit cut it"""
    FAILED = "failed"
    """the environment failed: it is not trained"""


class FilterStatus(StrEnum):
    """What rollout.filter decided about the group of a trajectory."""

    OFF = "off"
    """there is no filter: it is trained"""
    PASSED = "passed"
    """it is trained"""
    REJECTED = "rejected"
    """it is recorded and counts in the metrics, but is not trained"""


class TurnInfo(TypedDict):
    """What functions of the environment may ask about a turn of the assistant, by argument."""

    finish_reason: str
    """stop or length, see `Generation`"""
    num_tokens: int
    """sampled in the turn"""
    max_new_tokens: int
    """the most that it could have"""
    turn: int
    """its number in the trajectory, from 1"""


@dataclass
class Trajectory:
    """A conversation of the policy with the environment, and the training sequences it becomes."""

    id: int
    group: int
    messages: list[dict]
    row: dict = field(default_factory=dict)  # of the data; after a rollout, on the first process
    samples: list[Sample] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)  # by name of the part
    weights: dict[str, float] = field(default_factory=dict)  # of parts in the reward; 1 elsewhere
    finish_reason: FinishReason = FinishReason.PLAYING
    num_turns: int = 0  # finished turns of the assistant
    longest_turn: int = 0  # tokens of the longest of these turns
    # (version of the weights, number of tokens that they sampled), in order of time.
    versions: list[tuple[int, int]] = field(default_factory=list)
    partial_tokens: int = 0  # tokens of a turn that a pause interrupted
    row_index: int = -1  # of its row in the data
    source: str = ""  # of its row: the name in data.path.NAME or data.test_path.NAME, if any
    split: str = "train"  # or test, or test_NAME
    filter_status: FilterStatus = FilterStatus.OFF

    @property
    def key(self) -> tuple[str, int]:
        """The name by which the environment knows it."""
        return self.split, self.id

    @property
    def is_done(self) -> bool:
        """Whether it has ended and has its rewards."""
        return self.finish_reason != FinishReason.PLAYING

    @property
    def is_failed(self) -> bool:
        """Whether the environment failed, so that there is no reward."""
        return self.finish_reason == FinishReason.FAILED

    @property
    def is_truncated(self) -> bool:
        """Whether a length limit cut the answer."""
        return self.finish_reason == FinishReason.LENGTH

    @property
    def is_rejected(self) -> bool:
        """Whether rollout.filter left its group out of the training."""
        return self.filter_status == FilterStatus.REJECTED

    @property
    def reward(self) -> float:
        """The weighted sum of the reward parts."""
        return sum(self.weights.get(name, 1.0) * part for name, part in self.rewards.items())

    @property
    def length(self) -> int:
        """The number of tokens that the policy sampled; 0 if the environment failed."""
        if self.is_failed:
            return 0
        return sum(num_tokens for _, num_tokens in self.versions)

    def record(self) -> dict[str, Any]:
        """Returns what the run folder keeps of it: everything but the tokens."""
        is_filtered = None if self.filter_status == FilterStatus.OFF else self.is_rejected
        record = {
            "id": self.id,
            "group": self.group,
            "row": {k: _recorded(v) for k, v in self.row.items() if k != "messages"},
            "messages": self.messages,
            "rewards": self.rewards,
            "weights": self.weights,
            "reward": self.reward,
            "length": self.length,
            "num_turns": self.num_turns,
            "finish_reason": str(self.finish_reason),
            "versions": self.versions,
            "is_filtered": is_filtered,
        }
        return record | {"source": self.source} if self.source else record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Trajectory":
        """Returns the trajectory of a record, without samples.

        LookupError, TypeError or ValueError if the record is damaged.
        """
        statuses = {None: FilterStatus.OFF, False: FilterStatus.PASSED, True: FilterStatus.REJECTED}
        return cls(
            id=record["id"],
            group=record["group"],
            messages=record["messages"],
            row=record.get("row", {}),
            rewards=record.get("rewards", {}),
            weights=record.get("weights", {}),
            finish_reason=FinishReason(record["finish_reason"]),
            num_turns=record["num_turns"],
            versions=record["versions"],
            source=record.get("source", ""),
            filter_status=statuses[record.get("is_filtered")],
        )


@dataclass
class Group:
    """A prompt with the trajectories that start from it."""

    id: int
    prompt: Example
    trajectories: list[Trajectory]
    is_scored: bool = False  # it has the rewards of group_reward_fn

    @property
    def is_done(self) -> bool:
        return all(trajectory.is_done for trajectory in self.trajectories)


def in_order(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Returns the trajectories in the order of the data."""
    return sorted(trajectories, key=lambda trajectory: trajectory.id)


def mean_score(trajectories: list[Trajectory], part: str | None) -> float:
    """Returns the mean score of those that did not fail; NaN if all failed. `part`: `score_of`."""
    scores = [score_of(t.rewards, t.reward, part) for t in trajectories if not t.is_failed]
    return sum(scores) / len(scores) if scores else math.nan


def begin_group(
    group_id: int,
    prompt: Example,
    num_samples: int,
    first_trajectory: int = 0,
    split: str = "train",
) -> Group:
    """Makes `num_samples` new trajectories for one prompt.

    `first_trajectory` is the id of the first of them.
    """
    row = prompt.row
    messages = row["messages"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    group = Group(group_id, prompt, [])
    for i in range(num_samples):
        trajectory = Trajectory(first_trajectory + i, group_id, list(messages), row)
        trajectory.row_index = prompt.index
        trajectory.source = prompt.source
        trajectory.split = split
        begin_sample(trajectory, prompt.tokens)
        group.trajectories.append(trajectory)
    return group


def _recorded(value: object) -> Any:
    """Returns a column's value for the records: non-JSON values as text, and not too long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
        recorded = json.loads(text)
    except (TypeError, ValueError):  # keys that are not text, or an endless structure
        recorded = repr(value)
    if isinstance(recorded, str):
        text = recorded
    if len(text) <= MAX_RECORDED_CHARACTERS:
        return recorded
    return f"{text[:MAX_RECORDED_CHARACTERS]}... ({len(text)} characters)"


def begin_sample(trajectory: Trajectory, prompt: list[int]) -> None:
    """Starts a new training sequence of the trajectory with tokens that are not trained."""
    sample = Sample((), (), (), (), trajectory.group, trajectory.id)
    append_tokens(sample, prompt)
    trajectory.samples.append(sample)


def append_tokens(
    sample: Sample,
    tokens: Sequence[int],
    sampled_logps: Sequence[float] | None = None,
    candidates: Sequence[np.ndarray] | None = None,
) -> None:
    """Appends tokens: trained ones where the log-probabilities of their sampling are given.

    `candidates` are the ids that each of them was drawn from, if that is not the vocabulary.
    """
    if candidates is not None:
        missing = len(sample.tokens) - len(sample.candidate_counts)
        sample.candidate_counts.extend([0] * missing)
        sample.candidate_counts.extend(map(len, candidates))
        sample.candidate_ids.frombytes(np.concatenate(candidates).tobytes())
    is_trained = int(sampled_logps is not None)
    zeros = array("f", [0.0]) * len(tokens)
    sample.tokens.extend(array("i", tokens))  # which costs half of what a list does
    sample.mask.extend(array("b", [is_trained]) * len(tokens))
    sample.logps.extend(array("f", sampled_logps or zeros))
    sample.rewards.extend(zeros)


def place_reward(trajectory: Trajectory) -> None:
    """Puts the reward on tokens, in `Sample.rewards`: they sum to the trajectory's reward.

    The rewards of turns are on their tokens already, and the last sampled token gets the rest.
    Drops sequences without a sampled token.
    """
    trajectory.samples = [sample for sample in trajectory.samples if 1 in sample.mask]
    last_sample = trajectory.samples[-1]
    last_token = last_sample.mask.tobytes().rfind(1)
    last_sample.rewards[last_token] = 0.0
    placed = 0.0
    if "turns" in trajectory.rewards:  # of interact or step; other parts lie on the last token
        placed = sum(sum(sample.rewards) for sample in trajectory.samples)
    last_sample.rewards[last_token] = trajectory.reward - placed


def place_rewards(trajectories: list[Trajectory]) -> None:
    """Puts the rewards on tokens, when no part can be added any more."""
    for trajectory in trajectories:
        if not trajectory.is_failed and not trajectory.is_rejected:
            place_reward(trajectory)
