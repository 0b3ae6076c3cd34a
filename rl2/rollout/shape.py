"""Shaping of rewards: functions of a step's trajectories, before the rewards lie on tokens."""

from collections.abc import Callable

from rl2.rewards.text import overlong_score
from rl2.rollout.trajectory import Trajectory

Shape = Callable[[list[Trajectory]], None]


def add_overlong(
    trajectories: list[Trajectory], buffer: int, penalty: float, max_new_tokens: int
) -> None:
    """Adds the reward part `overlong` to all trajectories that have a reward.

    ValueError if the environment gives a part of that name.
    """
    for trajectory in trajectories:
        if "overlong" in trajectory.rewards:
            raise ValueError(
                "reward_fn returns a part named overlong, and rollout.overlong_buffer adds one of "
                "this name: rename that of reward_fn"
            )
        if not trajectory.is_failed:
            score = overlong_score(trajectory.longest_turn, max_new_tokens, buffer)
            trajectory.rewards["overlong"] = penalty * score
