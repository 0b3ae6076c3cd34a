"""faulty_env.py, and the faults that only a process survives. For rollout.env_isolation=process."""

import os
import re
import signal

import faulty_env

PROCESS_FAULTS = {
    "crash": os.abort,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "regex": lambda: re.match("(a+)+$", "a" * 50 + "b"),
    "closed": lambda: os.closerange(3, 65536),
}
FAULTS = {**faulty_env.REWARD_FAULTS, **PROCESS_FAULTS}


def reward_fn(messages, fault):
    if fault in PROCESS_FAULTS:
        return PROCESS_FAULTS[fault]()
    return faulty_env.reward_fn(messages, fault)
