"""CPU time of a rollout beside the engine: what rl2 does around one that answers at once.

    OMP_NUM_THREADS=1 python benchmarks/rollout_host.py TOKENIZER [--groups 256] [--samples 16]
        [--longest 512] [--repeats 5]

TOKENIZER is the folder of a model. The engine is rl2's for SGLang with a stand-in behind it, which
holds all requests until the last one has come, then answers all of them at once as SGLang does. The
answers are pieces of a text, of `longest` / 2 to `longest` tokens.

- request: CPU time before, for each request
- batch: from the last token to the batch of all answers, their rewards and `collate` included; on a
  quiet core it is the time that passes
"""

import argparse
import asyncio
import random
import time
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rl2.batch import collate
from rl2.data.chat import ChatTemplate
from rl2.data.examples import Example
from rl2.engine.base import SamplingParams
from rl2.engine.sglang import SGLangEngine
from rl2.env.call import Env
from rl2.env.contract import EnvFailures
from rl2.env.spec import EnvSpec
from rl2.parallel.mesh import init_distributed
from rl2.rollout.collect import Collector
from rl2.rollout.player import Player
from rl2.rollout.stats import summarise_step, take_samples
from rl2.run.signals import freeze_loaded

TEXT = Path(__file__).parent.parent / "docs/environments.md"


def reward_fn(messages, answer):
    return float(answer in messages[-1]["content"])


class StandIn(SGLangEngine):
    """The engine without SGLang: `engine.async_generate` is that of this object."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_requests: int, longest: int):
        self.index, self.count, self.version = 0, 1, 0
        self.max_running_requests = 256
        self.max_length, self.vocabulary = 2**15, len(tokenizer)
        self.num_aborts = self.num_requests = 0
        self.loop = asyncio.new_event_loop()
        self.engine = self
        text = tokenizer(TEXT.read_text())["input_ids"]
        rng = random.Random(0)
        self.answers = []
        for _ in range(num_requests):
            length = rng.randint(longest // 2, longest)
            start = rng.randrange(len(text) - length)
            tokens = text[start : start + length]
            self.answers.append([(-rng.random(), token, None) for token in tokens])

    async def async_generate(self, **request):
        number, self.num_begun = self.num_begun, self.num_begun + 1
        if self.num_begun == len(self.answers):
            self.answered_at = time.process_time()
            self.has_all.set()
        await self.has_all.wait()
        reason = {"type": "length", "length": len(self.answers[number])}
        return {
            "meta_info": {"output_token_logprobs": self.answers[number], "finish_reason": reason}
        }

    def begin(self):
        self.num_begun, self.has_all = 0, asyncio.Event()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer")
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    init_distributed()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    template = ChatTemplate(tokenizer)
    num_answers = arguments.groups * arguments.samples
    engine = StandIn(tokenizer, num_answers, arguments.longest)
    player = Player(
        engine=engine,
        envs={"": Env(EnvSpec(reward_fn))},
        templates={"": template},
        failures=EnvFailures(0.0),
        max_turns=1,
        max_length=2**15,
    )
    params = SamplingParams(max_new_tokens=arguments.longest)
    collector = Collector(player, params=params, write_records=lambda *_: None)
    prompts = []
    for number in range(arguments.groups):
        question = f"What is {number} + {number}? " + "Think step by step. " * 16
        row = {"messages": [{"role": "user", "content": question}], "answer": str(2 * number)}
        prompts.append(Example(number, row, [(template.encode_prompt(row["messages"]), [])]))
    freeze_loaded()  # as every run does before its first step
    for _ in range(arguments.repeats):
        engine.begin()
        start = time.process_time()
        trajectories = collector.play(prompts, params, arguments.samples, "train", 1)
        batch = collate(take_samples(trajectories))
        end = time.process_time()
        summarise_step(trajectories, 0)
        request = (engine.answered_at - start) / num_answers
        print(
            f"{num_answers} answers of {batch.mask.sum() / num_answers:.0f} tokens: request "
            f"{request * 1e6:.0f} us, batch {end - engine.answered_at:.3f} s, "
            f"metrics {time.process_time() - end:.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
