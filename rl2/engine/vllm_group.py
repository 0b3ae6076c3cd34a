"""The ranks that share a vLLM engine: all do what the first of them does, in the same order.

Each rank runs vLLM with its part of the weights and a scheduler of its own. They meet in the
collectives of each step, so they must have the same requests. The first rank has the callers of
`generate`. During a rollout it tells the others what it does with its requests.
"""

import itertools
import pickle
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from rl2.parallel.worlds import Channel

END = ""  # in the place of a method's name: the rollout is over

_group_numbers = itertools.count()  # every process counts the same engines


class Group:
    """The `tp_size` ranks of an engine, `rank` of the job among them. All ranks of the job call."""

    def __init__(self, rank: int, tp_size: int):
        self.is_first = rank % tp_size == 0
        self.channel: Channel | None = None  # with one rank there is nobody to tell
        number = next(_group_numbers)
        if tp_size > 1:
            name = f"rl2/vllm/{number}/{rank // tp_size}"
            store = dist.PrefixStore(name, _get_default_store())
            self.channel = Channel(store, rank % tp_size, tp_size)

    def tell(self, method: str, *arguments: Any) -> None:
        """Lets the other ranks call a method of their engine. Does not wait for them.

        On the others, which do as they are told, it does nothing.
        """
        if self.channel is not None and self.is_first:
            self.channel.send((method, arguments))

    def follow(self, engine: Any) -> None:
        """Calls the methods of `engine` that the first rank tells, until the rollout is over."""
        assert self.channel is not None
        while True:
            method, arguments = pickle.loads(self.channel.receive())
            if method == END:
                return
            getattr(engine, method)(*arguments)
