"""What an env file keeps for a trajectory. It stays where the functions of the file run.

A call may run in another process, so nothing here needs more than the standard library.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from rl2.env.contract import METHOD, signature_of

CLOSE = METHOD + "close"  # the last call of a trajectory, also without this method


@dataclass
class Session:
    """The object of a trajectory, and the dict that its functions may ask for."""

    environment: object = None
    state: dict = field(default_factory=dict)

    def make(self, make_env: Callable) -> None:
        self.environment = make_env()

    def bind(self, functions: Mapping[str, Callable], name: str) -> Callable:
        """Returns the function of the call `name`, with what it asks for of the session."""
        if name == "make_env":
            return partial(self.make, functions[name])
        if name == CLOSE:
            return getattr(self.environment, "close", lambda: None)
        owner, _, method = name.rpartition(".")
        function = getattr(self.environment, method) if owner else functions[name]
        own = {"state": self.state, "environment": self.environment}
        parameters = signature_of(function).parameters
        return partial(function, **{key: own[key] for key in own.keys() & set(parameters)})


class Sessions:
    """The sessions of the trajectories, by key. `functions` are those of the env file, by name."""

    def __init__(self, functions: Mapping[str, Callable]):
        self.functions = functions
        self._by_key: dict[Hashable, Session] = {}

    @contextmanager
    def open(self, name: str, key: Hashable) -> Iterator[Callable]:
        """The function of the call `name`. A call without a key has a session of its own."""
        if name == CLOSE:  # a new trajectory of this key may begin before the call ends
            yield self._by_key.pop(key, Session()).bind(self.functions, name)
            return
        session = Session() if key is None else self._by_key.setdefault(key, Session())
        try:
            yield session.bind(self.functions, name)
        finally:
            if session.environment is None and not session.state:
                self._by_key.pop(key, None)
