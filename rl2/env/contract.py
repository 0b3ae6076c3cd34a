"""The user's env file: loaded, checked before the model is, and called so that nothing it does can stop the run.

Async functions run on an event loop of their own, which lives as long as the run (as do the sessions they open there);
others run in threads. Whatever goes wrong inside is an EnvError, whose trajectory the caller masks.
"""

import inspect


class EnvError(Exception):
    """A failed call of the env: str() is the reason with the user's traceback; `kind` is equal for failures alike."""

    def __init__(self, reason: str, kind: str = ""):
        super().__init__(reason)
        self.kind = kind or reason


def _check_signature(function, name):
    if not callable(function):
        raise ValueError(f"{name}: expected a function, got {function!r}")
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        raise ValueError(
            f"{name}{inspect.signature(function)}: its arguments are passed by name; remove the '/'"
        )
    if not any(
        parameter.name == "messages" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters
    ):
        raise ValueError(
            f"{name}{inspect.signature(function)}: expected a parameter called messages"
        )


def _required(function) -> list[str]:
    """Parameters without default that the row has to provide."""
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name != "messages"
    ]


def _arguments(function, messages, row) -> dict:
    """What the function asks for by name: `messages` is the conversation, all else comes from the row."""
    available = {**row, "messages": messages}
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return available
    return {name: available[name] for name in parameters if name in available}


def _is_message(message) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and message["role"] != "assistant"  # the whole conversation handed back by mistake
        and isinstance(message.get("content"), str | list)
    )
