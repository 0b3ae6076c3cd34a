"""Trajectories: turns between the engine and the user's environment, and the training samples they become."""

from dataclasses import dataclass, field

from rl2.batch import Sample


@dataclass
class Trajectory:
    """One conversation of the policy with the environment. It stays on the process that made it, unless it is paused."""

    id: int
    group: int
    messages: list[dict]
    samples: list[Sample] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)  # the parts; their sum is the reward
    finish_reason: str = (
        ""  # stop | length of the last turn, or failed: the environment did; "" while it goes on
    )
    num_turns: int = 0
    versions: list[tuple[int, int]] = field(
        default_factory=list
    )  # (of the weights, tokens they sampled), in order
    partial: int = 0  # tokens of a turn that a pause cut short

    @property
    def reward(self) -> float:
        return sum(self.rewards.values())

    @property
    def length(self) -> int:
        """Tokens the policy sampled."""
        return sum(sum(sample.mask) for sample in self.samples)

    def record(self) -> dict:
        """What is told of it beside its tokens."""
        keys = (
            "id",
            "group",
            "messages",
            "rewards",
            "reward",
            "length",
            "num_turns",
            "finish_reason",
            "versions",
        )
        return {key: getattr(self, key) for key in keys}


@dataclass
class Group:
    """A row with the trajectories that start from it."""

    id: int
    row: dict
    trajectories: list[Trajectory]

    @property
    def done(self) -> bool:
        return all(trajectory.finish_reason for trajectory in self.trajectories)


def _begin_sample(trajectory):
    trajectory.samples.append(Sample([], [], [], [], trajectory.group, trajectory.id))
    return trajectory.samples[-1]


def _reward(trajectory):
    """The reward sits on the last token that was sampled; a sequence the policy said nothing in is dropped."""
    trajectory.samples = [sample for sample in trajectory.samples if any(sample.mask)]
    last = trajectory.samples[-1]
    last.rewards[max(i for i, sampled in enumerate(last.mask) if sampled)] = trajectory.reward


def _append(sample, tokens, mask, logps=None):
    sample.tokens.extend(tokens)
    sample.mask.extend([mask] * len(tokens))
    sample.logps.extend(logps or [0.0] * len(tokens))
    sample.rewards.extend([0.0] * len(tokens))
