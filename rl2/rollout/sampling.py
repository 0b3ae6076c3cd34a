"""Where the rollouts of a run come from: the seam `Sampling`, and engines beside the trainer."""

from dataclasses import dataclass
from typing import Any

from rl2 import cleanup
from rl2.engine.base import Engine, NamedTensors
from rl2.report.health import Metrics
from rl2.rollout.collect import Collector
from rl2.rollout.evaluate import Evaluator
from rl2.rollout.trajectory import Trajectory


class Sampling:
    """What a run of PPO samples with. All processes that train make the same calls.

    `Colocated` has an engine in each process that trains, `SamplerProcesses` engines on processes
    of their own, and `SavedRollouts` the rollouts of another run, without an engine.
    """

    # Whether the old policy of the loss is the one that sampled the trajectories of the last
    # `collect`, and not the actor before the update.
    old_policy_is_sampler = False
    rows_done: int  # training prompts of the finished steps, over all epochs

    def begin(self) -> None:
        """Follows `load_state_dict`, before any other call."""

    def collect(self, step: int) -> list[Trajectory]:
        """The trajectories of training step 1, 2, ... on every process. The engine sleeps then."""
        raise NotImplementedError

    def wake(self) -> None:
        """Ends the sleep. `load_weights` follows."""

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """As `Engine.load_weights`, in all engines."""

    def verify_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """As `Engine.verify_weights`, in all engines."""

    def evaluate(self, step: int, version: int) -> Metrics:
        """Plays the test sets, writes their transcripts, and returns their metrics."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the engines, and the environments that they play with."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@dataclass
class Colocated(Sampling):
    """Engines in the processes that train. They sleep while the others work."""

    collector: Collector
    evaluator: Evaluator

    @property
    def engine(self) -> Engine:
        return self.collector.player.engine

    @property
    def rows_done(self) -> int:  # type: ignore[override]
        return self.collector.rows_done

    def collect(self, step: int) -> list[Trajectory]:
        trajectories = self.collector.collect(step)
        self.engine.sleep()
        return trajectories

    def wake(self) -> None:
        self.engine.wake()

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self.engine.load_weights(named_tensors, version)

    def verify_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self.engine.verify_weights(named_tensors, version)

    def evaluate(self, step: int, version: int) -> Metrics:
        return self.evaluator.evaluate(step, version)

    def close(self) -> None:
        cleanup.unregister(self.engine.close)  # which closes that of a run that fails
        self.engine.close()
        for env in self.collector.player.envs.values():
            env.close()

    def state_dict(self) -> dict[str, Any]:
        return self.collector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.collector.load_state_dict(state)
