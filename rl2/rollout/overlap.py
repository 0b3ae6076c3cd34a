"""Rollouts on processes of their own, while the others train: rollout.num_processes.

The samplers run N = rollout.max_staleness steps ahead. They play the rollout of step k with the
weights after step k-1-N, and those of the first N+1 steps with the start model. The trainers say so
by the order of their requests, which do not wait for the samplers:

    rollouts 1 to 1+N, the weights of step 1, rollout 2+N, the weights of step 2, rollout 3+N, ...

The samplers do one after the other, and answer in the same order. So timing changes nothing: a run
repeats to the bit where a run without samplers does. After step k the rollouts of at most N further
steps are requested; a checkpoint waits for them and holds them.

`SamplerProcesses` is what the trainers see. `serve` is the loop of the samplers,
which have the engines.
"""

import pickle
from collections import deque
from dataclasses import dataclass
from typing import Any

from rl2.engine.base import Engine, NamedTensors
from rl2.parallel.worlds import Link
from rl2.report.health import Metrics
from rl2.rollout.collect import Collector
from rl2.rollout.evaluate import Evaluator
from rl2.rollout.sampling import Sampling
from rl2.rollout.trajectory import Trajectory

ANSWERED = ("collect", "evaluate")  # the verbs that the trainers wait for


@dataclass(frozen=True)
class Handover:
    """The rollout of a step, and what the trainers need to know of the collector after it."""

    trajectories: list[Trajectory]
    rows_done: int


class SamplerProcesses(Sampling):
    """The processes that sample, as the trainers see them. All trainers make the same calls.

    `begin` restores them before the first request.
    """

    def __init__(
        self,
        link: Link,
        num_steps: int,
        max_staleness: int,
        old_policy_is_sampler: bool,
    ):
        """`num_steps` are those of the whole run, and rollouts run `max_staleness` steps ahead."""
        self.link = link
        self.num_steps = num_steps
        self.max_staleness = max_staleness
        self.old_policy_is_sampler = old_policy_is_sampler
        self.rows_done = 0
        self.state = b""  # of the samplers after the newest rollout that has come
        self.ahead: deque[bytes] = deque()  # the rollouts of the next steps, pickled Handovers
        self.num_awaited = 0  # rollouts that are requested and have not come

    def collect(self, step: int) -> list[Trajectory]:
        """Returns the trajectories of a step, and lets further ones be sampled."""
        newest_requested = step - 1 + len(self.ahead) + self.num_awaited
        last = min(step + self.max_staleness, self.num_steps)
        for later in range(newest_requested + 1, last + 1):
            self._send("collect", later)
            self.num_awaited += 1
        self.wait()
        handover: Handover = pickle.loads(self.ahead.popleft())
        self.rows_done = handover.rows_done
        return handover.trajectories

    def wait(self) -> None:
        """Waits for the rollout of the next step, if it is requested."""
        while self.num_awaited and not self.ahead:
            self._receive_rollout()

    def _wait_for_all(self) -> None:
        """Waits for all rollouts that are requested."""
        while self.num_awaited:
            self._receive_rollout()

    def _receive_rollout(self) -> None:
        handover, self.state = self._receive()
        self.num_awaited -= 1
        self.ahead.append(handover)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, with all rollouts that are requested: waits for them.
        All trainers call.
        """
        self._wait_for_all()
        ahead = pickle.dumps(list(self.ahead))
        return {"rows_done": self.rows_done, "samplers": self.state, "ahead": ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows_done = state["rows_done"]
        self.state = state["samplers"]
        self.ahead = deque(pickle.loads(state["ahead"]))

    def begin(self) -> None:
        """Restores the samplers' position in the data, before any other request."""
        self._send("begin", self.state)

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """As `Engine.load_weights`, in all engines, once the rollouts before have been played.
        Does not wait until they have been loaded.
        """
        self._send_weights("load_weights", named_tensors, version)

    def verify_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """As `Engine.verify_weights`, in all engines; an error ends the job from there."""
        self._send_weights("verify_weights", named_tensors, version)

    def _send_weights(self, verb: str, named_tensors: NamedTensors, version: int) -> None:
        self._send(verb, version)
        # While the samplers play, they take no weights, and the trainers go on.
        self.link.send_weights(named_tensors, waits=not self.num_awaited)

    def close(self) -> None:
        """Ends the samplers' engines, environments and processes."""
        self._wait_for_all()
        self._send("close")
        self.link.flush()

    def evaluate(self, step: int, version: int) -> Metrics:
        """The trainers wait for it, so its metrics are those of `step`."""
        self._send("evaluate", step, version)
        self._wait_for_all()
        metrics: Metrics = self._receive()
        return metrics

    def _send(self, verb: str, *arguments: object) -> None:
        self.link.send((verb, arguments))

    def _receive(self) -> Any:
        """Waits for the next answer, and returns its value.

        RuntimeError in the samplers' words if they failed.
        """
        value, error = pickle.loads(self.link.receive_answer())
        if error is not None:
            raise RuntimeError(error)
        return value


class Serving:
    """What a sampler does for the trainers. They request a method by its name."""

    def __init__(self, link: Link, collector: Collector, evaluator: Evaluator):
        self.link = link
        self.collector = collector
        self.evaluator = evaluator
        self.engine: Engine = collector.player.engine

    def begin(self, state: bytes) -> None:
        if state:
            self.collector.load_state_dict(pickle.loads(state))

    def collect(self, step: int) -> None:
        collector = self.collector
        trajectories = collector.collect(step)
        handover = Handover(trajectories, collector.rows_done)
        # The trainers read the handover when its step begins, or put it in a checkpoint.
        self._answer((pickle.dumps(handover), pickle.dumps(collector.state_dict())))

    def evaluate(self, step: int, version: int) -> None:
        self._answer(self.evaluator.evaluate(step, version))

    def load_weights(self, version: int) -> None:
        self.engine.load_weights(self.link.receive_weights(), version)

    def verify_weights(self, version: int) -> None:
        self.engine.verify_weights(self.link.receive_weights(), version)

    def fail(self, error: Exception) -> None:
        """Tells the trainers why there is no answer."""
        self.link.answer((None, f"the processes that sample failed: {error}"))
        self.link.flush()

    def _answer(self, value: object) -> None:
        self.link.answer((value, None))


def serve(serving: Serving) -> None:
    """Does what the trainers request, until they close."""
    while True:
        verb, arguments = serving.link.receive()
        if verb == "close":
            serving.link.flush()
            return
        try:
            getattr(serving, verb)(*arguments)
        except Exception as error:
            if verb in ANSWERED:
                serving.fail(error)
            raise
