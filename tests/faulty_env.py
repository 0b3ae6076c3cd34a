"""An env file whose calls fail in every way that the row asks for: see FAULTS.

The column `fault` of the row names one, or is "" for none.
"""

import sys
import time


def raises(error):
    raise error


def recurse(depth=0):
    return recurse(depth + 1)


def compute_for_ever():
    while True:
        pass


def catch_everything():
    """Takes longer than any limit here, and ends: a busy thread slows all later tests."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            while time.monotonic() < deadline:
                pass
        except BaseException:  # an attempt to end this call
            pass


def nest(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def contain_itself():
    value = []
    value.append(value)
    return value


def messages(extra):
    return [{"role": "tool", "content": "t", "extra": extra}]


REWARD_FAULTS = {
    "error": lambda: raises(ValueError("caf\udce9")),
    "exit": lambda: sys.exit(3),
    "stop iteration": lambda: next(iter([])),
    "recursion": recurse,
    "endless": compute_for_ever,
    "stubborn": catch_everything,
    "sleep": lambda: time.sleep(6),
    "nan": lambda: float("nan"),
    "cyclic reward": contain_itself,
    "part": lambda: {"a": 1.0, "b": None},
}
INTERACT_FAULTS = {
    "very deep": lambda: messages(nest(100_000)),
    "cyclic": lambda: messages(contain_itself()),
    "no json": lambda: messages(object()),
    "digits": lambda: messages(10**10_000),
    "interact error": lambda: raises(KeyError("x")),
}
FAULTS = {**REWARD_FAULTS, **INTERACT_FAULTS}


def interact(messages, fault):
    """One tool message after the first turn, in which the surrogate is no fault."""
    if fault in INTERACT_FAULTS:
        return INTERACT_FAULTS[fault]()
    return [{"role": "tool", "content": "caf\udce9"}] if len(messages) < 4 else []


def reward_fn(messages, fault):
    return REWARD_FAULTS[fault]() if fault in REWARD_FAULTS else {"caf\udce9": 1.0}
