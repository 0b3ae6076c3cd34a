"""An engine whose groups have as many right answers as a test says, and collectors with it.

As a program under two processes it collects three steps and prints what each process has.
"""

import json
import sys
import textwrap
from pathlib import Path

import torch.distributed as dist
from common import make_tokenizer
from scripted import ScriptedEngine, train_rows

from rl2.data.chat import ChatTemplate
from rl2.env.contract import EnvFailures
from rl2.env.load import load_env
from rl2.parallel.mesh import all_gather_objects, init_distributed
from rl2.rollout.collect import Collector
from rl2.rollout.player import Player

ENV = """
    def reward_fn(messages, answer):
        if "f" in messages[-1]["content"]:
            raise RuntimeError("the environment fails")
        return {"right": float(messages[-1]["content"].startswith("r"))}
"""
# Of 2 answers to each of 12 prompts so many are right, and three steps train 3 prompts each. Rows 1
# and 6 are the slowest, so the rows behind them are done first. They do not take their places.
THREE_STEPS = {
    "num_right": [2, 1, 0, 1, 2, 1, 1, 1, 0, 0, 1, 2],
    "seconds": {1: 0.2, 6: 0.2},
    "batch_size": 3,
    "filter": [0.0, 1.0],
    "max_refills": 3,
}
PARTIAL = {"deterministic": False, "partial": True, "num_steps": 9}


class ScriptedGroups(ScriptedEngine):
    """The first num_right[row] answers to the prompt of a row are right; None: all fail in the env.

    An answer takes seconds[row], by default none. It has lengths[row] tokens with its end.
    """

    def __init__(self, tokenizer, num_right, seconds):
        super().__init__(tokenizer, self.answer, self.seconds_of)
        self.num_right = num_right
        self.row_seconds = seconds
        self.lengths = {}
        self.index, self.count = dist.get_rank(), dist.get_world_size()

    @property
    def requested_rows(self):
        """The row of each request."""
        return [int(self.tokenizer.decode(prompt).split("<q>")[1]) for _, prompt in self.requests]

    def answer(self, turn, seed):
        row = self.requested_rows[-1]
        num_right = self.num_right[row]
        letter = "f" if num_right is None else "r" if seed[4] < num_right else "w"
        return letter * (self.lengths.get(row, 2) - 1), "stop"

    def seconds_of(self, seed):
        is_continued = self.params[-1].continued_tokens > 0
        return 0.001 if is_continued else self.row_seconds.get(self.requested_rows[-1], 0.001)


def make_collector(folder, num_right, seconds, batch_size, **options) -> Collector:
    """A collector of two answers to each prompt; `options` are its own and those of its rules."""
    env_file = folder / f"env_of_rank_{dist.get_rank()}.py"
    env_file.write_text(textwrap.dedent(ENV))
    tokenizer = make_tokenizer()
    rows = [
        {"messages": [{"role": "user", "content": f"<q>{i}<q>"}], "answer": str(i)}
        for i in range(len(num_right))
    ]
    engine = ScriptedGroups(tokenizer, num_right, seconds)
    envs = {"": load_env(env_file, 5)}
    player = Player(engine, envs, {"": ChatTemplate(tokenizer)}, EnvFailures(0.0), 1, 400)
    return train_rows(player, rows, batch_size, **options)


def rows_of(trajectories):
    """The numbers of the rows of the groups that are trained, and of those that are not."""
    trained = [t.row_index for t in trajectories if not t.is_rejected]
    filtered = [t.row_index for t in trajectories if t.is_rejected]
    return list(dict.fromkeys(trained)), list(dict.fromkeys(filtered))


def main() -> None:
    init_distributed()
    for options in ({"deterministic": True}, {"deterministic": False}, PARTIAL):
        collector = make_collector(Path(sys.argv[1]), **THREE_STEPS, **options)
        rows, numbers = [], []
        for step in (1, 2, 3):
            trajectories = collector.collect(step)
            trajectories.sort(key=lambda trajectory: trajectory.id)
            rows.append(rows_of(trajectories))
            numbers.append([(t.id, t.group, t.reward, len(t.samples)) for t in trajectories])
        own = {
            "rows": rows,
            "numbers": numbers,
            "position": collector.cursor.position,
            "carried_over": [group.id for group in collector.carried_over],
        }
        ranks = all_gather_objects(own)
        if dist.get_rank() == 0:
            print(json.dumps({"options": options, "ranks": ranks}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
