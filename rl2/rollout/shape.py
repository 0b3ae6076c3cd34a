"""Shaping of rewards: functions of a step's trajectories, before the rewards lie on tokens."""

from collections.abc import Callable

from rl2.rewards.text import overlong_score
from rl2.rollout.trajectory import Trajectory, place_reward

Shape = Callable[[list[Trajectory]], None]


def add_overlong(
    trajectories: list[Trajectory], buffer: int, penalty: float, max_new_tokens: int
) -> None:
    """Adds the reward part `overlong` to all trajectories that have a reward."""
    for trajectory in trajectories:
        if not trajectory.is_failed:
            score = overlong_score(trajectory.longest_turn, max_new_tokens, buffer)
            _add_part(trajectory, "overlong", penalty * score)


def _add_part(trajectory: Trajectory, name: str, value: float) -> None:
    """Adds a part to the rewards. ValueError if the environment gives one of that name."""
    if name in trajectory.rewards:
        raise ValueError(
            f"reward_fn returns a part named {name}, and a key of rollout adds a part of this "
            "name: rename that of reward_fn"
        )
    trajectory.rewards[name] = value


def place_rewards(trajectories: list[Trajectory]) -> None:
    """Puts the rewards on tokens, when no part can be added any more."""
    for trajectory in trajectories:
        if not trajectory.is_failed and not trajectory.is_rejected:
            place_reward(trajectory)
