"""Where the rollouts of a run come from: the seam `Sampling`.

`Colocated` has an engine in each process that trains, `Samplers` engines on processes of their own,
and `SavedRollouts` the rollouts of another run. All processes that train make the same calls.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from rl2 import cleanup
from rl2.engine.base import Engine, NamedTensors
from rl2.report.health import Metrics
from rl2.rollout.collect import Collector
from rl2.rollout.evaluate import Evaluator
from rl2.rollout.overlap import Samplers
from rl2.rollout.saved import SavedRollouts
from rl2.rollout.trajectory import Trajectory


@dataclass
class Colocated:
    """Engines in the processes that train. They sleep while the others work."""

    collector: Collector
    evaluator: Evaluator
    # The old policy of the loss is the actor before the update, and not the one that sampled: these
    # are the same, up to the lag of partial rollouts.
    clips_to_sampler = False
    metrics: ClassVar[Metrics] = {}  # beside what the trajectories tell

    @property
    def engine(self) -> Engine:
        return self.collector.player.engine

    @property
    def rows_done(self) -> int:
        """Training prompts of the finished steps, over all epochs."""
        return self.collector.rows_done

    def begin(self) -> None:
        """Follows `load_state_dict`, before any other call."""

    def collect(self, step: int) -> list[Trajectory]:
        """The trajectories of training step 1, 2, ... The engine sleeps afterwards."""
        trajectories = self.collector.collect(step)
        self.engine.sleep()
        return trajectories

    def wake(self) -> None:
        """Ends the sleep. `load_weights` follows."""
        self.engine.wake()

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self.engine.load_weights(named_tensors, version)

    def verify_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self.engine.verify_weights(named_tensors, version)

    def evaluate(self, step: int, version: int) -> Metrics:
        return self.evaluator.evaluate(step, version)

    def close(self) -> None:
        close_engine(self.engine)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return self.collector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.collector.load_state_dict(state)


Sampling = Colocated | Samplers | SavedRollouts


def close_engine(engine: Engine) -> None:
    """Closes the engine of a run that has come to its end. `cleanup` closes that of others."""
    cleanup.unregister(engine.close)
    engine.close()
