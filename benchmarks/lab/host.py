"""Host work and host memory of one PPO step on one rank, without models, engines and the network.

    python benchmarks/lab/host.py [--prompts 512] [--samples 16] [--length 8192] [--ranks 64]
        [--rank 0] [--critic]

All ranks are simulated in one process. Each plays its groups from random tokens; what it sends goes
to files. Then one rank runs a step as `rl2.trainer.ppo.train` does: it receives what all ranks
sent, and gathers, collates, plans, packs and records. Reading the files is the network's work: its
time is not counted, the memory of the received bytes is.

With --critic the step has a critic, a reference and the KL divergence in the reward: five plans
instead of one. The first rank writes the records. Printed are the seconds and the peak of memory of
each phase, in bytes a token. An answer has `length` tokens or a few less.

PYTHONPATH chooses the checkout that is measured. Linux only.
"""

import argparse
import random
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _object_to_tensor, _tensor_to_object

import rl2
from rl2.algorithms import losses
from rl2.batch import collate, drop_zero_advantages, split_minibatches
from rl2.config.schema import PPOConfig
from rl2.data.examples import Example
from rl2.packing import pack, plan_micro_batches
from rl2.report import loggers
from rl2.rollout import collect
from rl2.rollout.stats import summarise, summarise_groups, to_records, training_samples
from rl2.rollout.trajectory import FinishReason, append_tokens, begin_group, place_reward
from rl2.run.folder import RunFolder
from rl2.trainer.ppo import add_advantages

PROMPT_TOKENS = 256
JITTER = 512  # an answer has up to this many tokens less than the longest
CHARACTERS_A_TOKEN = 4
ATTENTION_COST = 2e-5  # of a 7B model
HOST = torch.device("cpu")


# What the end of a phase of `train` calls. Older checkouts have none.
release_freed_memory = getattr(loggers, "release_freed_memory", lambda: None)


class Meter:
    """Seconds and peak memory of phases. `pause` stops the clock of the phase that runs."""

    def __init__(self):
        self.start_bytes = read_status("VmRSS")
        self.rows = []
        self.paused = 0.0

    @contextmanager
    def phase(self, name):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is in use
        self.paused = 0.0
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start - self.paused
        after, peak = read_status("VmRSS"), read_status("VmHWM")
        self.rows.append((name, seconds, peak - self.start_bytes, after - self.start_bytes))

    @contextmanager
    def pause(self):
        start = time.perf_counter()
        yield
        self.paused += time.perf_counter() - start

    def report(self, num_tokens):
        print(f"{'phase':12} {'seconds':>8} {'peak':>7} {'after':>7}   bytes a token")
        for name, seconds, peak, after in self.rows:
            print(f"{name:12} {seconds:8.2f} {peak / num_tokens:7.1f} {after / num_tokens:7.1f}")
        seconds = sum(row[1] for row in self.rows)
        peak = max(row[2] for row in self.rows)
        print(f"{'step':12} {seconds:8.2f} {peak / num_tokens:7.1f}")


def read_status(name):
    """Bytes of this process by the name of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


class Network:
    """The collectives of objects, through files. It stands in for torch.distributed's.

    While a rank sends, each call writes its object and answers with copies of it. The measured rank
    then makes the same calls, and each one gives it the objects of all ranks. Memory is that of
    torch: all objects as bytes in one buffer, of the longest one's length each.
    """

    def __init__(self, folder, num_ranks, meter):
        self.folder = Path(folder)
        self.num_ranks = num_ranks
        self.meter = meter
        self.rank = 0
        self.call = 0
        self.is_measured = False

    def install(self):
        dist.get_world_size = lambda group=None: self.num_ranks
        dist.get_rank = lambda group=None: self.rank
        dist.all_gather_object = self.all_gather_object
        dist.gather_object = self.gather_object

    def begin(self, rank, is_measured=False):
        self.rank = rank
        self.call = 0
        self.is_measured = is_measured

    def all_gather_object(self, values, value):
        own, _ = _object_to_tensor(value, HOST, None)
        self.call += 1
        if self.is_measured:
            self.receive(values)
        else:
            own.numpy().tofile(self.path(self.rank))
            values[:] = [value] * self.num_ranks

    def gather_object(self, value, values=None):
        if self.rank == 0:
            self.all_gather_object(values, value)
        else:
            self.all_gather_object([None] * self.num_ranks, value)

    def path(self, rank):
        return self.folder / f"{self.call}_{rank}"

    def receive(self, values):
        sizes = [self.path(rank).stat().st_size for rank in range(self.num_ranks)]
        buffers = torch.empty(self.num_ranks, max(sizes), dtype=torch.uint8)
        with self.meter.pause():
            for rank, size in enumerate(sizes):
                with open(self.path(rank), "rb") as file:
                    file.readinto(buffers[rank, :size].numpy())
        for rank, size in enumerate(sizes):
            values[rank] = _tensor_to_object(buffers[rank], torch.tensor(size), None)


def play_groups(arguments, rank, text):
    """The finished groups of one rank: random tokens, and a text of as many characters."""
    rng = np.random.default_rng(rank)
    groups = []
    for group_id in range(rank, arguments.prompts, arguments.ranks):
        prompt = rng.integers(0, 150_000, PROMPT_TOKENS).tolist()
        row = {"messages": text[: PROMPT_TOKENS * CHARACTERS_A_TOKEN], "answer": str(group_id)}
        first_trajectory = group_id * arguments.samples
        group = begin_group(
            group_id, Example(group_id, row, [(prompt, [])]), arguments.samples, first_trajectory
        )
        for trajectory in group.trajectories:
            length = int(rng.integers(max(1, arguments.length - JITTER), arguments.length + 1))
            tokens = rng.integers(0, 150_000, length).tolist()
            append_tokens(trajectory.samples[-1], tokens, (-rng.random(length)).tolist())
            start = int(rng.integers(0, len(text) // 2))
            reply = text[start : start + length * CHARACTERS_A_TOKEN]
            trajectory.messages.append({"role": "assistant", "content": reply})
            trajectory.versions.append((0, length))
            trajectory.num_turns = 1
            trajectory.finish_reason = FinishReason.STOP
            trajectory.rewards = {"reward": float(rng.integers(0, 2))}
            place_reward(trajectory)
        groups.append(group)
    return groups


def make_config(with_critic):
    config = PPOConfig()
    config.adv.norm_var = True
    if with_critic:
        config.adv.estimator = "gae"
        config.kl.type = "reward"
        config.kl.coef = 0.01
    else:
        config.adv.estimator = "reinforce"
        config.kl.type = "none"
    return config


def plan_and_pack(meter, arguments, batch, worker):
    """The host's part of one `infer` or `update`: the plan, and the packs of this rank."""
    with meter.phase(f"{worker} plan"):
        limits = (arguments.budget, arguments.ranks)
        plan = plan_micro_batches(batch, *limits, True, ATTENTION_COST)
    with meter.phase(f"{worker} pack"):
        for ranks in plan:
            pack(batch.select(ranks[arguments.rank]))


def infer(meter, arguments, batch, worker):
    """Scores as `Worker.infer` returns them: a column in host memory."""
    plan_and_pack(meter, arguments, batch, worker)
    return torch.rand(batch.engine_logps.shape).neg_()


def run_step(meter, arguments, config, played, folder):
    """What `train` does between the engine and the models. Returns the number of tokens."""
    with meter.phase("gather"):
        trajectories = collect._gather_trajectories(played)
    del played[:]
    with meter.phase("collate"):
        batch = collate(training_samples(trajectories))
        release_freed_memory()
    with meter.phase("summarise"):
        summarise(trajectories, 0)
        summarise_groups(trajectories)
    num_tokens = sum(PROMPT_TOKENS + t.versions[0][1] for t in trajectories)
    if arguments.critic:
        batch.ref_logps = infer(meter, arguments, batch, "reference")
        batch.old_logps = infer(meter, arguments, batch, "actor")
        batch.values = infer(meter, arguments, batch, "critic")
    release_freed_memory()
    with meter.phase("advantages"):
        add_advantages(batch, config, {})
    for worker in ("critic", "actor") if arguments.critic else ("actor",):
        with meter.phase("weights"):
            (part,) = split_minibatches(batch, 1, 0)
            part.token_weights = losses.token_weights(part.mask, part.trajectory, "token")
            if worker == "actor" and not arguments.critic:
                drop_zero_advantages(part)
        plan_and_pack(meter, arguments, part, worker)
    release_freed_memory()
    with meter.phase("records"):
        target = SimpleNamespace(is_first=arguments.rank == 0, path=Path(folder), first_records={})
        RunFolder.write_records(target, "train", 1, to_records(trajectories, batch))
    return num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rank", type=int, default=0, help="the measured one")
    parser.add_argument("--budget", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--critic", action="store_true")
    arguments = parser.parse_args()
    print(f"{rl2.__path__[0]}: {arguments}")
    text = "".join(random.Random(0).choices("abcdefgh \n", k=2**20))
    with tempfile.TemporaryDirectory() as folder:
        network = Network(folder, arguments.ranks, meter=None)
        network.install()
        for rank in range(arguments.ranks):
            network.begin(rank)
            collect._gather_trajectories(play_groups(arguments, rank, text))
        played = play_groups(arguments, arguments.rank, text)
        network.meter = meter = Meter()
        network.begin(arguments.rank, is_measured=True)
        num_tokens = run_step(meter, arguments, make_config(arguments.critic), played, folder)
        meter.report(num_tokens)


if __name__ == "__main__":
    sys.exit(main())
