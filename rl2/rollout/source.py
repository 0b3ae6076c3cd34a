"""Where PPO gets the rollout of each step."""

from typing import Any, Protocol

from rl2.report.health import Metrics
from rl2.rollout.trajectory import Trajectory


class RolloutSource(Protocol):
    """Gives the trajectories of each step. All processes that train make the same calls.

    A `Collector` plays the prompts with the engines of these processes, `Samplers` lets other
    processes of the job do so, and `SavedRollouts` reads what a run has saved.
    """

    @property
    def clips_to_sampler(self) -> bool:
        """Whether the loss has its ratio to the policy that sampled the last rollout.

        Then the engine's log-probabilities are the old ones. Otherwise the old policy is the actor
        before the update.
        """

    @property
    def rows_done(self) -> int:
        """Training prompts of the finished steps, over all epochs."""

    def collect(self, step: int) -> list[Trajectory]:
        """Returns the trajectories of training step 1, 2, ..., on every process.

        Their messages are needed on the first process only, which writes them.
        """

    def summarise(self) -> Metrics:
        """Metrics of the last rollout that its trajectories do not tell."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs. All processes call."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the rollout that `state_dict` followed."""
