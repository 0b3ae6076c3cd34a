"""What an env file defines: its functions, and the methods and tools of its objects.

rl2/env/contract.py describes each of them. `read_spec` finds them once, when the file is loaded.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType, ModuleType
from typing import Any

from transformers.utils import get_json_schema

from rl2.env.contract import METHOD, METHODS, check_signature, project_of
from rl2.env.results import raising_env_error


@dataclass(frozen=True)
class ObjectSpec:
    """What the objects of `make_env` have. `make_object_spec` makes it."""

    make_env: Callable
    methods: Mapping[str, Callable]  # reset, step, reward, ...
    tools: Mapping[str, Callable]
    schemas: list[dict]  # of the tools, for the chat template


@dataclass(frozen=True)
class EnvSpec:
    """The functions of an env file; None or empty for those that it does not define."""

    reward_fns: Mapping[str, Callable] = field(default_factory=dict)
    interact: Callable | None = None
    extract: Callable | None = None
    group_reward_fn: Callable | None = None
    run: Callable | None = None
    play: Callable | None = None
    object: ObjectSpec | None = None

    @property
    def methods(self) -> Mapping[str, Callable]:
        return self.object.methods if self.object else {}

    @property
    def tools(self) -> Mapping[str, Callable]:
        return self.object.tools if self.object else {}

    @property
    def tool_schemas(self) -> list[dict]:
        return self.object.schemas if self.object else []

    @property
    def agent(self) -> str | None:
        """The name of the function that takes all turns: run, play, or None if there is none."""
        if self.run is not None:
            return "run"
        return "play" if self.play is not None else None

    @property
    def judges(self) -> bool:
        """Whether something rewards a trajectory beside its agent and the turns of `step`."""
        return bool(self.reward_functions()) or self.group_reward_fn is not None

    @property
    def keeps_state(self) -> bool:
        """Whether something is kept between the calls of a trajectory."""
        return self.object is not None or bool(
            {"state", "base_url", "generate"} & self.parameters()
        )

    def reward_functions(self) -> dict[str, Callable]:
        """Returns what rewards one trajectory: the functions of the file, then the methods."""
        functions = dict(self.reward_fns)
        for name in ("reward", "get_reward"):
            if name in self.methods:
                functions[METHOD + name] = self.methods[name]
        return functions

    def functions(self) -> dict[str, Callable]:
        """Returns the functions of the file, by name."""
        functions = dict(self.reward_fns)
        others = {
            "interact": self.interact,
            "make_env": self.object.make_env if self.object else None,
            "extract": self.extract,
            "group_reward_fn": self.group_reward_fn,
            "run": self.run,
            "play": self.play,
        }
        for name, function in others.items():
            if function is not None:
                functions[name] = function
        return functions

    def row_functions(self) -> dict[str, Callable]:
        """Returns the functions and methods, which may ask for columns.

        The model calls the tools.
        """
        functions = self.functions()
        for name, method in self.methods.items():
            functions[METHOD + name] = method
        return functions

    def parameters(self) -> set[str]:
        """Returns the names of all that the functions, methods and tools ask for."""
        names: set[str] = set()
        for function in (*self.row_functions().values(), *self.tools.values()):
            names.update(inspect.signature(function).parameters)
        return names


def read_spec(module: ModuleType) -> EnvSpec:
    """Returns what the module of an env file defines.

    Raises ValueError when the file works with no row, EnvError when its `make_env` fails.
    """
    reward_fns = _find_reward_functions(module)
    group_reward_fn = getattr(module, "group_reward_fn", None)
    make_env = getattr(module, "make_env", None)
    interact = getattr(module, "interact", None)
    extract = _function_with(module, "extract", "messages")
    run = _function_with(module, "run", "base_url")
    play = _function_with(module, "play", "generate")
    if run and play:
        raise ValueError("`run` and `play` both play the whole trajectory: remove one of them")
    if (run or play) and (interact or make_env):
        agent = "run" if run else "play"
        raise ValueError(
            f"`{agent}` plays the whole trajectory: remove it, or interact and make_env"
        )
    if play and not inspect.iscoroutinefunction(play):
        raise ValueError("play must be async: async def play(row, generate)")
    if not (reward_fns or make_env or group_reward_fn or run or play):
        raise ValueError(
            "expected a function reward_fn(messages, answer), found none; a reward function of "
            "TRL or verl works too: reward_fn = NAME"
        )
    others = {
        "interact": interact,
        "extract": extract,
        "group_reward_fn": group_reward_fn,
        "run": run,
        "play": play,
    }
    for name, function in {**reward_fns, **others}.items():
        if function is not None:
            check_signature(function, name)
    objects = make_object_spec(make_env) if make_env is not None else None
    return EnvSpec(reward_fns, interact, extract, group_reward_fn, run, play, objects)


def _find_reward_functions(module: ModuleType) -> dict[str, Callable]:
    """`reward_fn` of an env file, or else verl's `compute_score`, or all that TRL would call."""
    reward_fn = getattr(module, "reward_fn", None)
    if reward_fn is not None:
        return {"reward_fn": reward_fn}
    functions = {}
    for name, value in vars(module).items():
        project = project_of(value) if inspect.isfunction(value) else ""
        if name == "compute_score" and project == "verl":
            return {name: value}
        if project == "TRL" and name[0] != "_":
            functions[name] = value
    return functions


def _function_with(module: ModuleType, name: str, parameter: str) -> Callable | None:
    """The function of that name, unless it lacks the parameter and so has another purpose."""
    function: Any = getattr(module, name, None)
    if inspect.isfunction(function) and parameter in inspect.signature(function).parameters:
        return function
    return None


def make_object_spec(make_env: Callable) -> ObjectSpec:
    """Returns what the objects that `make_env` makes have.

    A function is called once to see what it makes. Raises EnvError if that fails; ValueError if the
    objects have neither step nor a tool, or if a tool has no schema.
    """
    kind = make_env
    if not inspect.isclass(kind):
        with raising_env_error("make_env"):
            kind = type(make_env())
    methods: dict[str, Callable] = {}
    tools: dict[str, Callable] = {}
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if name in METHODS:
            methods[name] = MethodType(function, kind)
        elif name[0] != "_" and function.__doc__:
            tools[name] = MethodType(function, kind)
    if "step" not in methods and not tools:
        raise ValueError(
            "make_env: expected a method step(message), or public methods with docstrings as tools"
        )
    schemas = [_tool_schema(function) for function in tools.values()]
    return ObjectSpec(make_env, methods, tools, schemas)


def _tool_schema(function: Callable) -> dict:
    try:
        return get_json_schema(function)
    except Exception as error:  # transformers has classes of its own for types and texts
        raise ValueError(
            f"make_env: the method {function.__name__} has a docstring, so it is a tool, but "
            f"{error} If it is not a tool, begin its name with _"
        ) from error
