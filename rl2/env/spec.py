"""What an env file defines: its functions, and the methods and tools of its objects.

rl2/env/contract.py describes each of them. `read_spec` finds them once, when the file is loaded.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MethodType
from typing import Any

from transformers.utils import get_json_schema

from rl2.env.contract import MARKS, METHOD, METHODS, EnvError, check_signature
from rl2.env.results import raising_env_error

# Functions of an env file.
FUNCTIONS = ("reward_fn", "interact", "make_env", "group_reward_fn", "run", "play", "step")


@dataclass(frozen=True)
class EnvSpec:
    """What an env file and its objects define; None or empty for what they do not define."""

    reward_fn: Callable | None = None
    interact: Callable | None = None
    group_reward_fn: Callable | None = None
    run: Callable | None = None
    play: Callable | None = None
    step: Callable | None = None
    make_env: Callable | None = None
    methods: Mapping[str, Callable] = field(default_factory=dict)  # reset, step, reward, ...
    tools: Mapping[str, Callable] = field(default_factory=dict)
    tool_schemas: list[dict] = field(default_factory=list)  # for the chat template
    system_prompt: str | None = None  # of conversations that begin with no system message

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
        return self.make_env is not None or bool(
            {"state", "base_url", "generate"} & self.parameters()
        )

    def reward_functions(self) -> dict[str, Callable]:
        """Returns what rewards one trajectory: the function of the file, then the methods."""
        functions = {} if self.reward_fn is None else {"reward_fn": self.reward_fn}
        for name in ("reward", "get_reward"):
            if name in self.methods:
                functions[METHOD + name] = self.methods[name]
        return functions

    def functions(self) -> dict[str, Callable]:
        """Returns the functions of the file, by name."""
        functions = {name: getattr(self, name) for name in FUNCTIONS}
        return {name: function for name, function in functions.items() if function is not None}

    def row_functions(self) -> dict[str, Callable]:
        """Returns the functions and methods, which may ask for columns.

        The model calls the tools.
        """
        return self.functions() | {METHOD + name: method for name, method in self.methods.items()}

    def parameters(self) -> set[str]:
        """Returns the names of all that the functions, methods and tools ask for."""
        names: set[str] = set()
        for function in chain(self.row_functions().values(), self.tools.values()):
            names.update(inspect.signature(function).parameters)
        return names


def read_spec(functions: Mapping[str, Any]) -> EnvSpec:
    """Returns what the names of an env file define.

    Raises ValueError when the file works with no row, also because its `make_env` fails.
    """
    make_env = functions.get("make_env")
    run, play, step = (_marked_function(functions, name) for name in MARKS)
    if run and play:
        raise ValueError("`run` and `play` both play the whole trajectory: remove one of them")
    if (run or play) and (make_env or functions.get("interact")):
        agent = "run" if run else "play"
        raise ValueError(
            f"`{agent}` plays the whole trajectory: remove it, or interact and make_env"
        )
    others = (run, play, make_env, functions.get("interact"), functions.get("reward_fn"))
    if step and any(others):
        raise ValueError(
            "`step` plays and rewards the whole trajectory: remove it, or the other functions"
        )
    methods, tools = _members_of(make_env) if make_env is not None else ({}, {})
    system_prompt = functions.get("SYSTEM_PROMPT")
    if system_prompt is not None and not (isinstance(system_prompt, str) and system_prompt.strip()):
        raise ValueError(f"SYSTEM_PROMPT: expected a text, got {system_prompt!r:.80}")
    spec = EnvSpec(
        reward_fn=functions.get("reward_fn"),
        interact=functions.get("interact"),
        group_reward_fn=functions.get("group_reward_fn"),
        run=run,
        play=play,
        step=step,
        make_env=make_env,
        methods=methods,
        tools=tools,
        tool_schemas=[_tool_schema(tool) for tool in tools.values()],
        system_prompt=system_prompt,
    )
    if play and not inspect.iscoroutinefunction(play):
        raise ValueError("play must be async: async def play(row, generate)")
    if spec.functions().keys() <= {"interact"}:
        raise ValueError("expected a function reward_fn(messages, answer), found none")
    for name, function in spec.functions().items():
        if name != "make_env":
            check_signature(function, name)
    return spec


def _marked_function(functions: Mapping[str, object], name: str) -> Callable | None:
    """The function of that name, unless it lacks its mark and so has another purpose."""
    function = functions.get(name)
    if inspect.isfunction(function) and MARKS[name] in inspect.signature(function).parameters:
        return function
    return None


def _members_of(make_env: Callable) -> tuple[dict[str, Callable], dict[str, Callable]]:
    """(the methods, the tools) of the objects that `make_env` makes, by name.

    A function is called once to see what it makes. Raises ValueError if that fails, or if the
    objects have neither step nor a tool.
    """
    kind = make_env
    if not inspect.isclass(kind):
        try:
            with raising_env_error("make_env"):
                kind = type(make_env())
        except EnvError as error:
            raise ValueError(str(error)) from error
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
    return methods, tools


def _tool_schema(function: Callable) -> dict:
    try:
        return get_json_schema(function)
    except Exception as error:  # transformers has classes of its own for types and texts
        raise ValueError(
            f"make_env: the method {function.__name__} has a docstring, so it is a tool, but "
            f"{error} If it is not a tool, begin its name with _"
        ) from error
