"""What happens to the trajectories of a step between collecting and training: a list of functions.

Each shape is a function of all trajectories of the step, on every process.
"""

import itertools
from collections.abc import Callable

from rl2.rewards.text import overlong_score
from rl2.rollout.trajectory import Trajectory, mean_score, place_reward

Shape = Callable[[list[Trajectory]], None]


def add_length_penalty(
    trajectories: list[Trajectory], coef: float, max_new_tokens: int, score: str | None
) -> None:
    """Adds the reward part `length_penalty`: -coef max(p, 1 / K) tokens / max_new_tokens.

    p is the success of the K answers to the prompt, between 0 and 1, before anything is added:
    each token costs more where the policy succeeds (ALP, arXiv:2506.05256). `score` is the part
    that says success; None is the reward.
    """
    for _, group in itertools.groupby(trajectories, lambda trajectory: trajectory.group):
        members = [trajectory for trajectory in group if not trajectory.is_failed]
        success = min(1.0, mean_score(members, score)) if members else 0.0
        for trajectory in members:
            price = coef * max(success, 1 / len(members))
            share = trajectory.length / max_new_tokens
            _add_part(trajectory, "length_penalty", -price * share)


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
