"""Rollouts on processes of their own, while the others train: rollout.num_processes.

Trainers and samplers meet once a step, see parallel/worlds.py. At the end of step k the samplers
have played the rollout of step k+1. They hand it over, receive the weights of step k, and play the
rollout of step k+2 with them. So step k trains on a rollout of the weights after step k-2, and
steps 1 and 2 on rollouts of the start model. Timing changes nothing: a run repeats to the bit where
a run without samplers does.

`Samplers` is what the trainers see: it takes the place of the collector, the engine and the
evaluator. `serve` is the loop of the samplers, which have the real ones.
"""

import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rl2.engine.base import Engine, NamedTensors
from rl2.parallel.worlds import Link
from rl2.report.health import Metrics
from rl2.rollout.collect import Collector, WriteRecords
from rl2.rollout.evaluate import Evaluator
from rl2.rollout.trajectory import Trajectory

ANSWERED = ("collect", "evaluate")  # the verbs that the trainers wait for


@dataclass(frozen=True)
class Request:
    """What the samplers are to do: the name of a method of `Serving`, and its arguments."""

    verb: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Handover:
    """The rollout of a step, and what the trainers need to know of the collector after it."""

    trajectories: list[Trajectory]
    metrics: Metrics  # of `Collector.summarise`
    rows_done: int
    is_exhausted: bool


@dataclass(frozen=True)
class RolloutAnswer:
    """What the samplers answer to a request for a rollout."""

    handover: bytes  # pickled: the trainers read it when its step begins, or put it in a checkpoint
    state: bytes  # pickled, of `Collector.state_dict`
    seconds: float  # that the rollout took


@dataclass(frozen=True)
class Answer:
    """What the samplers answer: a value, or why there is none."""

    value: Any = None
    error: str | None = None
    records: list[tuple[str, int, list[dict[str, Any]]]] = field(default_factory=list)
    """transcripts to write: split, step, and a record for each trajectory"""
    is_stopping: bool = False  # a sampler was asked to stop


class Samplers:
    """The processes that sample, as the trainers see them. All trainers make the same calls.

    A rollout is requested when the one before it is taken, so there is at most one at the samplers.
    `begin` restores them before the first request.
    """

    def __init__(
        self,
        link: Link,
        num_steps: int,
        has_other_policy: bool,
        write_records: WriteRecords,
        request_stop: Callable[[], None],
    ):
        """`num_steps` are those of the whole run. `has_other_policy`: the log-probabilities of the
        engines are the old ones of the loss. `request_stop` ends the run after its step.
        """
        self.link = link
        self.num_steps = num_steps
        self.has_other_policy = has_other_policy
        self.write_records = write_records
        self.request_stop = request_stop
        self.version: int | None = None  # of the weights that the engines have
        self.rows_done = 0
        self.is_exhausted = False
        self.metrics: Metrics = {}
        self.state = b""  # of the samplers after the newest rollout
        self.ahead = b""  # the rollout of the next step, a pickled Handover, if it has come
        self.is_awaited = False  # a rollout is requested and has not come
        self.met_at = time.perf_counter()

    # In the place of a collector.

    def collect(self, step: int) -> list[Trajectory]:
        """Returns the trajectories of training step 1, 2, ..., and lets the next one be sampled."""
        if not self.ahead and not self.is_awaited:
            self._request_rollout(step)
        self.wait()
        handover: Handover = pickle.loads(self.ahead)
        self.ahead = b""
        self.rows_done = handover.rows_done
        self.is_exhausted = handover.is_exhausted
        self.metrics |= handover.metrics
        if step < self.num_steps and not self.is_exhausted:
            self._request_rollout(step + 1)
        return handover.trajectories

    def wait(self) -> None:
        """Waits for the rollout that the samplers are playing, if there is one."""
        if not self.is_awaited:
            return
        began = time.perf_counter()
        rollout: RolloutAnswer = self._open(self.link.receive_answer())
        self.is_awaited = False
        self.ahead, self.state = rollout.handover, rollout.state
        now = time.perf_counter()
        between = max(now - self.met_at, 1e-9)
        self.metrics = {
            "overlap/sampler_busy": min(1.0, rollout.seconds / between),
            "overlap/trainer_busy": 1 - (now - began) / between,
        }
        self.met_at = now

    def summarise(self) -> Metrics:
        """Metrics of the training prompts, and how busy the two worlds were up to the last meeting.

        These are shares of the time since the meeting before.
        """
        return self.metrics

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs. The rollout of the next step is part of it."""
        return {"rows_done": self.rows_done, "samplers": self.state, "ahead": self.ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows_done = state["rows_done"]
        self.state = state["samplers"]
        self.ahead = state["ahead"]

    # In the place of an engine.

    def begin(self) -> None:
        """Restores the samplers' position in the data, before any other request."""
        self._send("begin", self.state)

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """As `Engine.load_weights`, in all engines. Does not wait until they have been loaded."""
        self._send_weights("load_weights", named_tensors, version)

    def verify_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """As `Engine.verify_weights`, in all engines; an error ends the job from there."""
        self._send_weights("verify_weights", named_tensors, version)

    def _send_weights(self, verb: str, named_tensors: NamedTensors, version: int) -> None:
        self._send(verb, version)
        self.link.send_weights(named_tensors)
        self.version = version

    def close(self) -> None:
        """Ends the samplers' engines, environments and processes."""
        self.wait()
        self._send("close")

    # In the place of an evaluator.

    def evaluate(self, step: int, version: int) -> Metrics:
        """As `Evaluator.evaluate`. The trainers wait for it, so its metrics are those of `step`."""
        self._send("evaluate", step, version)
        return self._open(self.link.receive_answer())

    # The link.

    def _request_rollout(self, step: int) -> None:
        self._send("collect", step)
        self.is_awaited = True

    def _send(self, verb: str, *arguments: Any) -> None:
        assert not self.is_awaited, f"{verb} while the samplers play a rollout"
        self.link.send(Request(verb, arguments))

    def _open(self, answer: bytes) -> Any:
        """Returns the value of an answer, whose transcripts are written.

        RuntimeError in the samplers' words if they failed.
        """
        opened: Answer = pickle.loads(answer)
        if opened.is_stopping:
            self.request_stop()
        for split, step, records in opened.records:
            self.write_records(split, step, records)
        if opened.error is not None:
            raise RuntimeError(opened.error)
        return opened.value


class Serving:
    """What a sampler does for the trainers. Each public method is a verb of `Request`."""

    def __init__(
        self,
        link: Link,
        collector: Collector,
        evaluator: Evaluator | None,
        listen: Callable[[], Callable[[], bool]],
    ):
        """`listen` starts to listen for signals, and returns whether one has asked for a stop."""
        self.link = link
        self.collector = collector
        self.evaluator = evaluator
        self.engine: Engine = collector.player.engine
        self.listen = listen
        self.is_stopping: Callable[[], bool] = lambda: False
        self.records: list[tuple[str, int, list[dict[str, Any]]]] = []
        collector.write_records = self.keep_records

    def keep_records(self, split: str, step: int, records: Iterable[dict[str, Any]]) -> None:
        """Takes the place of the run folder's `write_records`: the first trainer writes."""
        self.records.append((split, step, list(records)))

    def begin(self, state: bytes) -> None:
        if state:
            self.collector.load_state_dict(pickle.loads(state))
        self.is_stopping = self.listen()

    def collect(self, step: int) -> None:
        began = time.perf_counter()
        trajectories = self.collector.collect(step)
        collector = self.collector
        handover = Handover(
            trajectories, collector.summarise(), collector.rows_done, collector.is_exhausted
        )
        state = pickle.dumps(collector.state_dict())
        seconds = time.perf_counter() - began
        self._answer(RolloutAnswer(pickle.dumps(handover), state, seconds))

    def evaluate(self, step: int, version: int) -> None:
        assert self.evaluator is not None
        self._answer(self.evaluator.evaluate(step, version))

    def load_weights(self, version: int) -> None:
        self.engine.load_weights(self.link.receive_weights(), version)

    def verify_weights(self, version: int) -> None:
        self.engine.verify_weights(self.link.receive_weights(), version)

    def fail(self, error: Exception) -> None:
        """Tells the trainers why there is no answer."""
        self._answer(None, error=f"the processes that sample failed: {error}")

    def _answer(self, value: Any, error: str | None = None) -> None:
        records, self.records = self.records, []
        self.link.answer(Answer(value, error, records, self.is_stopping()))


def serve(serving: Serving) -> None:
    """Does what the trainers request, until they close."""
    while True:
        request: Request = serving.link.receive()
        if request.verb == "close":
            return
        try:
            getattr(serving, request.verb)(*request.arguments)
        except Exception as error:
            if request.verb in ANSWERED:
                serving.fail(error)
            raise
