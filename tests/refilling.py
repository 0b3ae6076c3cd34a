"""An engine whose groups have as many right answers as a test says, and collectors with it.

As a program under two processes it collects three steps and prints what each process has.
"""

import asyncio
import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from common import make_tokenizer, pack_rows

from rl2.data.chat import ChatTemplate
from rl2.data.examples import PROMPT_ROWS, DataCursor, Examples
from rl2.engine.base import Generation, SamplingParams
from rl2.env.contract import EnvFailures
from rl2.env.load import load_env
from rl2.parallel.mesh import all_gather_objects, init_distributed
from rl2.rollout.collect import NO_RULES, Collector
from rl2.rollout.player import Player

PARAMS = SamplingParams(max_new_tokens=16, stop_token_ids=(2,))
ENV = """
    def reward_fn(messages, answer):
        if "f" in messages[-1]["content"]:
            raise RuntimeError("the environment fails")
        return {"right": float(messages[-1]["content"].startswith("r"))}
"""


class ScriptedGroups:
    """The first num_right[row] answers to the prompt of a row are right; None: all fail in the env.

    An answer takes seconds[row], by default none. It has lengths[row] tokens with its end.
    """

    TWO_PROCESSES = {
        "num_right": [2, 1, 0, 1, 2, 1, 1, 1, 0, 0, 1],
        "seconds": {1: 0.2, 6: 0.2},
        "batch_size": 3,
        "filter": [0.0, 1.0],
        "max_refills": 3,
    }
    max_running_requests = 4
    version = 0

    def __init__(self, tokenizer, num_right, seconds):
        self.template = ChatTemplate(tokenizer)
        self.tokenizer = tokenizer
        self.num_right = num_right
        self.seconds = seconds
        self.lengths = {}
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self.loop = asyncio.new_event_loop()
        self.begun_rows = set()
        self.num_aborted = 0
        self.ended_keys = []  # of the trajectories that the env need not know any more
        self.aborts = asyncio.Event()

    async def generate(self, prompt, params, seed):
        text = self.tokenizer.decode(prompt)
        row = int(text.split("<q>")[1])
        number = seed[4]
        self.begun_rows.add(row)
        self.aborts.clear()
        num_right = self.num_right[row]
        letter = "f" if num_right is None else "r" if number < num_right else "w"
        reply = self.template.tokenize(letter * (self.lengths.get(row, 2) - 1))
        tokens = [*reply, self.tokenizer.eos_token_id]
        done = params.continued_tokens
        if self.seconds.get(row) and not done:
            try:
                await asyncio.wait_for(self.aborts.wait(), self.seconds[row])
                self.num_aborted += 1
                return Generation(tokens[:1], [-0.1], "abort", self.version)
            except TimeoutError:
                pass
        await asyncio.sleep(0.001)
        return Generation(tokens[done:], [-0.1] * len(tokens[done:]), "stop", self.version)

    def abort(self):
        self.aborts.set()


def make_collector(folder, num_right, seconds, batch_size, **options) -> Collector:
    """A collector of two answers to each prompt; `options` are its own and those of its rules."""
    env_file = folder / f"env_of_rank_{dist.get_rank()}.py"
    env_file.write_text(textwrap.dedent(ENV))
    tokenizer = make_tokenizer()
    template = ChatTemplate(tokenizer)
    rows = [
        {"messages": [{"role": "user", "content": f"<q>{i}<q>"}], "answer": str(i)}
        for i in range(len(num_right))
    ]
    engine = ScriptedGroups(tokenizer, num_right, seconds)
    env = load_env(env_file, 5)
    end = env.end

    async def end_and_note(key):
        engine.ended_keys.append(key)
        await end(key)

    env.end = end_and_note
    own = ("params", "num_steps", "deterministic")
    arguments = {name: options.pop(name) for name in own if name in options}
    prompts = Examples(
        pack_rows(rows), template, PROMPT_ROWS, max_length=100, batch_size=batch_size
    )
    return Collector(
        Player(engine, env, template, EnvFailures(0.0), 1, 400),
        cursor=DataCursor(prompts),
        write_records=lambda split, step, records: None,
        samples_per_prompt=2,
        rules=replace(NO_RULES, **options),
        **{"params": PARAMS, **arguments},
    )


def main() -> None:
    init_distributed()
    partial = {"deterministic": False, "partial": True, "num_steps": 9}
    for options in ({"deterministic": True}, {"deterministic": False}, partial):
        collector = make_collector(Path(sys.argv[1]), **ScriptedGroups.TWO_PROCESSES, **options)
        rows, numbers = [], []
        for step in (1, 2, 3):
            trajectories = collector.collect(step)
            trajectories.sort(key=lambda trajectory: trajectory.id)
            trained = [t.row_index for t in trajectories if not t.is_rejected]
            filtered = [t.row_index for t in trajectories if t.is_rejected]
            rows.append((list(dict.fromkeys(trained)), list(dict.fromkeys(filtered))))
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
