"""What an environment is: the functions of the user's env file.

    def reward_fn(messages, answer): ...  # required: the reward of a conversation that has ended
    def interact(messages): ...           # used when rollout.max_turns > 1: answers the last turn
    def extract(messages): ...            # the answer alone, for the majority vote of an evaluation

Each may be async. Arguments are passed by name: `messages` is the conversation so far, every other
name is a column of the row, and `**columns` receives all columns. `reward_fn` returns a number, or
a dict of reward parts whose sum is the reward. `interact` returns a list of new messages, none of
them from the assistant. An empty list ends the conversation. `extract` returns the answer as a text
or a number, or None if the conversation has none. Equal answers are one vote. A function of that
name without the parameter `messages` is another one, which rl2 does not call.

Reward functions of TRL and verl are called as their own trainers call them, with one conversation
at a time. In place of `reward_fn` a file may have `compute_score` (verl), or any number of TRL's,
whose rewards are the parts.
"""

import difflib
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
# What functions may ask for without a column of that name.
GIVEN_INPUTS = "messages prompts completions completion_ids solution_str extra_info".split()

logger = logging.getLogger(__name__)


class EnvError(Exception):
    """A call of the environment failed. The rollout masks the trajectory, so it is not trained.

    `str(error)` is the reason and, if the user's code raised, its traceback. Failures that differ
    in their data only have the same `kind`.
    """

    def __init__(self, reason: str, kind: str = ""):
        super().__init__(reason)
        self.kind = kind or reason


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


def find_env_file(path: str) -> Path:
    """The env file that `path` names: a file that exists, or a ready-made env by its bare name.

    Raises ValueError, with the names of the ready-made envs, when `path` is neither.
    """
    file = Path(path).expanduser()
    if file.is_file():
        return file
    # A wheel carries the ready-made envs inside the package. In a checkout they stand beside it.
    folder = PACKAGE / "ready_envs"
    if not folder.is_dir():
        folder = PACKAGE.parent / "envs"
    ready_made = {env.stem: env for env in sorted(folder.glob("*.py"))}
    if path in ready_made:
        return ready_made[path]
    near = difflib.get_close_matches(file.stem, ready_made, n=2)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(
        f"rollout.env_path={path}: no such file, and no ready-made env of that name; "
        f"{hint}there are {', '.join(ready_made)}"
    )


def check_signature(function: Callable, name: str) -> None:
    """Raises ValueError when `function` cannot be called by the names of its parameters."""
    if not callable(function):
        raise ValueError(f"{name}: expected a function, got {function!r}")
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        raise ValueError(f"{name}{signature}: its arguments are passed by name; remove the '/'")
    has_messages = "messages" in signature.parameters or _takes_all_columns(signature)
    if not has_messages and not project_of(function):
        raise ValueError(f"{name}{signature}: expected a parameter called messages")


def project_of(function: Callable) -> str:
    """The project whose signature a reward function has: TRL, verl, or "" for rl2's own."""
    parameters = inspect.signature(function).parameters
    if "messages" in parameters:
        return ""
    if "completions" in parameters or "completion_ids" in parameters:
        return "TRL"
    return "verl" if "solution_str" in parameters else ""


def required_columns(function: Callable) -> list[str]:
    """The columns that a row must have: parameters without a default that are not given anyway."""
    columns = []
    for name, parameter in inspect.signature(function).parameters.items():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.default is parameter.empty and name not in GIVEN_INPUTS:
            columns.append(name)
    if project_of(function) == "verl":
        return ["answer" if name == "ground_truth" else name for name in columns]
    return columns


def select_arguments(function: Callable, messages: list[dict], row: dict) -> dict[str, Any]:
    """The arguments that `function` asks for, by name.

    `messages` is always the conversation, even if the row has a column with that name. The sampled
    tokens, `completion_ids` of the row, are for those only that name them.
    """
    available = {**row, "messages": messages}
    project = project_of(function)
    if project:
        available = _foreign_inputs(project, messages, row)
    signature = inspect.signature(function)
    names = set(signature.parameters)
    if _takes_all_columns(signature):
        names |= available.keys() - {"completion_ids"}
    return {name: value for name, value in available.items() if name in names}


def _foreign_inputs(project: str, messages: list[dict], row: dict) -> dict[str, Any]:
    """What the trainer of a project passes to its reward functions."""
    prompt = row["messages"]
    reply: Any = messages[1 if isinstance(prompt, str) else len(prompt) :]
    text = "\n".join(str(message["content"]) for message in reply)
    if project == "verl":
        inputs = {"extra_info": {}, **row, "solution_str": text}
        return inputs | {"ground_truth": row.get("answer")}
    inputs = {"completion_ids": [], **row, "prompts": prompt}
    inputs["completions"] = text if isinstance(prompt, str) else reply
    return {name: [value] for name, value in inputs.items() if name != "messages"}


def unwrap_reward(name: str, function: Callable, result: Any) -> Any:
    """The reward of one conversation, or its parts, from what the function `name` returned.

    TRL's None, for a function that does not apply, is 0. Beside `score`, verl only logs.
    """
    project = project_of(function)
    if project == "TRL" and isinstance(result, list) and len(result) == 1:
        return {name: result[0] or 0.0}
    if project == "verl" and isinstance(result, dict):
        return result.get("score", result)
    return result


def is_env_message(message: Any) -> bool:
    """Whether `message` is one that `interact` may return."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        # The assistant's role means that the env returned the whole conversation by mistake.
        and message["role"] != "assistant"
        and isinstance(message.get("content"), str | list)
    )


def _takes_all_columns(signature: inspect.Signature) -> bool:
    parameters = signature.parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
