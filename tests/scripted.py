"""A scripted engine, and prompts and collectors for the tests of rollouts."""

import asyncio
import functools

import pytest
import torch.distributed as dist
from common import pack_rows

from rl2.agents.player import AgentPlayer
from rl2.data.chat import ChatTemplate
from rl2.data.examples import PROMPT_ROWS, DataCursor, Examples, Mixture
from rl2.engine.base import Generation, SamplingParams
from rl2.parallel.mesh import init_distributed
from rl2.rollout.collect import Collector
from rl2.rollout.filter import FilteredSchedule
from rl2.rollout.partial import PartialCollector
from rl2.rollout.player import Player

PARAMS = SamplingParams(max_new_tokens=16, stop_token_ids=(2,))


@pytest.fixture(scope="module", autouse=True)
def process_group():
    init_distributed()
    yield
    dist.destroy_process_group()


class ScriptedEngine:
    """Generates `script(turn, seed)`, which returns (text, finish reason).

    An answer takes `seconds(seed)`; seed[3] is the number of its group. `abort` ends it early, with
    a part of its tokens.
    """

    max_running_requests = 4
    index = 0
    count = 1
    version = 0

    def __init__(self, tokenizer, script, seconds=lambda seed: 0.001):
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self.script = script
        self.seconds = seconds
        self.loop = asyncio.new_event_loop()
        self.requests = []  # (seed, prompt) of each
        self.params = []  # of each request
        self.num_running = 0
        self.max_num_running = 0
        self.num_aborted = 0
        self.aborts = asyncio.Event()

    async def generate(self, prompt, params, seed):
        self.requests.append((seed, list(prompt)))
        self.params.append(params)
        self.num_running += 1
        self.max_num_running = max(self.max_num_running, self.num_running)
        text, finish_reason = self.script(seed[-1], seed)
        tokens = self.template.tokenize(text)
        if finish_reason == "stop":
            tokens = [*tokens, self.tokenizer.eos_token_id]
        tokens = tokens[params.continued_tokens :]
        seconds, start = self.seconds(seed), self.loop.time()
        try:
            await asyncio.wait_for(self.aborts.wait(), seconds)
            share = (self.loop.time() - start) / seconds
            tokens = tokens[: max(1, int(share * len(tokens)))]
            finish_reason = "abort"
            self.num_aborted += 1
        except TimeoutError:
            pass
        finally:
            self.num_running -= 1
        logps = [-0.1 * (i + 1) - 100 * self.version for i in range(len(tokens))]
        return Generation(tokens, logps, finish_reason, self.version)

    def abort(self):
        self.aborts.set()
        self.aborts = asyncio.Event()


def player_class(env, **options):
    """What makes players for the env, as a run chooses it."""
    return functools.partial(AgentPlayer, **options) if env.spec.agent else Player


def make_row(i):
    return {"messages": [{"role": "user", "content": f"q{i}"}], "answer": str(i)}


def train_rows(
    player,
    rows,
    batch_size,
    num_samples=2,
    filter=(),
    max_refills=0,
    partial=False,
    max_staleness=None,
    num_steps=99,
    **options,
):
    """A collector for training; `options` are its own, the others as the keys of the config."""
    options = {"params": PARAMS, "deterministic": True, **options}
    new_collector = Collector
    if partial:
        new_collector = PartialCollector
        options |= {"num_steps": num_steps, "max_staleness": max_staleness}
    if filter:
        options["new_schedule"] = functools.partial(
            FilteredSchedule, bounds=filter, max_refills=max_refills
        )
    prompts = Examples(pack_rows(rows), player.templates[""], PROMPT_ROWS, max_length=100)
    return new_collector(
        player,
        cursor=DataCursor(Mixture({"": prompts}, batch_size=batch_size)),
        write_records=write_nothing,
        samples_per_prompt=num_samples,
        **options,
    )


def write_nothing(split, step, records):
    pass
