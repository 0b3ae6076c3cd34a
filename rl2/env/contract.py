"""What an environment is: the functions of the user's env file.

    def reward_fn(messages, answer): ...  # the reward of a conversation that has ended
    def interact(messages): ...           # used when rollout.max_turns > 1: answers the last turn
    def group_reward_fn(trajectories): ...  # rewards that compare the answers to one prompt
    class make_env: ...                   # an object for each trajectory, with tools
    async def run(row, base_url, model): ...  # an agent that calls the model over HTTP
    async def play(row, generate): ...    # a loop of one's own around the model
    async def step(state, action, extra_info): ...  # of RL2 upstream: rl2/rollout/text_player.py
    SYSTEM_PROMPT = "..."                 # of conversations without a system message

Each may be async. Arguments are passed by name: columns of the row and, where it has no column of
that name, GIVEN_INPUTS. docs/environments.md says what each function may ask for and return, with
the methods of `make_env`. A function that has a name in MARKS, but lacks the parameter there, is
another one, which rl2 does not call.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

API_KEY = "OPENAI_API_KEY"  # the environment variable in which clients of OpenAI look for it
PLACEHOLDER_KEY = "rl2"  # its value if the user has set none
# What functions may ask for without a column of that name.
GIVEN_INPUTS = {
    # kept for the trajectory, by rl2/env/session.py
    "state",
    "environment",
    # of every conversation, and of its last turn
    "messages",
    "message",
    "action",
    "turn",
    "finish_reason",
    "num_tokens",
    "max_new_tokens",
    "completion_ids",
    # of a group
    "trajectories",
    # of `run` and `play`
    "row",
    "base_url",
    "model",
    "api_key",
    "generate",
}
# Parameters that tell functions of an env file from others of the same name.
MARKS = {"run": "base_url", "play": "generate", "step": "extra_info"}
# Methods of an environment's object that are not tools. The names of their calls begin so.
METHODS = ("reset", "step", "reward", "get_reward", "close")
METHOD = "environment."
TOOL = "tool."

logger = logging.getLogger(__name__)


class EnvError(Exception):
    """A call of the environment failed. The rollout masks the trajectory, so it is not trained.

    `str(error)` is the reason and, if the user's code raised, its traceback. Failures that differ
    in their data only have the same `kind`.
    """

    def __init__(self, reason: str, kind: str = ""):
        super().__init__(reason)
        self.kind = kind or reason


class LateError(EnvError):
    """A call did not return within its time."""


@dataclass
class Turn:
    """The environment's answer to a turn of the assistant. Without messages the trajectory ends."""

    messages: list[dict] = field(default_factory=list)
    reward: float = 0.0  # of the turn
    done: bool = False  # ends the trajectory after the messages


@dataclass
class TextTurn:
    """What `step` of the env file answers to a turn."""

    reward: float  # of the turn
    done: bool
    score: float  # says success, and is not trained
    extra_info: Any  # for the next turn
    next_state: str | None  # the whole text of the next prompt


def add_parts(parts: dict[str, float], others: dict[str, float]) -> None:
    """Adds reward parts to those that there are. Parts of one name are summed."""
    for name, value in others.items():
        parts[name] = parts.get(name, 0.0) + value


class EnvFailures:
    """Counts the failed calls of this process and stops the run when too many fail.

    The first failure of each kind is logged in full. Later ones of that kind are only counted.
    `max_fraction` is the fraction of trajectories that may fail: rollout.max_env_failures.
    """

    def __init__(self, max_fraction: float):
        self.max_fraction = max_fraction
        self.count = 0
        self.last: EnvError | None = None
        self._logged_kinds: set[str] = set()

    def record(self, error: EnvError) -> None:
        self.count += 1
        self.last = error
        if error.kind not in self._logged_kinds:
            self._logged_kinds.add(error.kind)
            logger.warning(
                "an environment call failed, its trajectory is masked "
                "(more failures of this kind are counted, not logged): %s",
                error,
            )

    def check(self, num_failed: int, num_total: int) -> None:
        """Raises RuntimeError when more than `max_fraction` of the trajectories failed.

        Both counts are sums over all processes, so that every process stops at the same step.
        """
        if num_failed > self.max_fraction * num_total:
            raise RuntimeError(
                f"the environment failed on {num_failed} of {num_total} trajectories, more than "
                f"rollout.max_env_failures={self.max_fraction:g} allows. The last failure of this "
                f"process: {self.last or 'none, see the log of the other processes'}"
            )


def check_signature(function: Callable, name: str) -> None:
    """Raises ValueError when `function` cannot be called by the names of its parameters."""
    if not callable(function):
        raise ValueError(f"{name}: expected a function, got {function!r}")
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        raise ValueError(f"{name}{signature}: its arguments are passed by name; remove the '/'")
    inputs = {"messages", "environment", "trajectories", "base_url", "generate", "action"}
    has_messages = inputs & signature.parameters.keys()
    if not (has_messages or _takes_all_columns(signature)):
        needed = "action" if name == "step" else "messages"
        raise ValueError(f"{name}{signature}: expected a parameter called {needed}")


_kept_signature = lru_cache(maxsize=64)(inspect.signature)


def signature_of(function: Callable) -> inspect.Signature:
    """The signature. Reading it takes a fifth of a short call, so that of a function is kept."""
    is_kept = inspect.isfunction(function)  # a kept method would keep its object
    return _kept_signature(function) if is_kept else inspect.signature(function)


def required_columns(function: Callable) -> list[str]:
    """The columns that a row must have: parameters without a default that are not given anyway."""
    columns = []
    for name, parameter in signature_of(function).parameters.items():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.default is parameter.empty and name not in GIVEN_INPUTS:
            columns.append(name)
    return columns


def select_arguments(
    function: Callable, messages: list[dict], row: dict, inputs: Mapping[str, object]
) -> dict[str, object]:
    """Returns the arguments that `function` asks for, by name.

    `messages` is always the conversation, even if the row has a column with that name. Other
    `inputs` are for those functions only that name them, and give way to columns.
    """
    available = dict(inputs) | row | {"messages": messages}
    signature = signature_of(function)
    names = set(signature.parameters)
    if _takes_all_columns(signature):
        names |= {"messages"} | row.keys()
    return {name: value for name, value in available.items() if name in names}


def _takes_all_columns(signature: inspect.Signature) -> bool:
    parameters = signature.parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
