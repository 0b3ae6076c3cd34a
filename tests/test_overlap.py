"""Runs with rollout.num_processes: some processes sample while the others train.

The weights that sample the rollout of a step are as old as rollout.max_staleness says, whatever
takes how long.
"""

import pickle
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from common import (
    launch,
    letter_run,
    make_model,
    read_jsonl,
    read_metrics,
    read_untimed_metrics,
    same_weights,
)
from safetensors.torch import load_file

from rl2.parallel.worlds import Channel
from rl2.rollout.overlap import Handover, SamplerProcesses

PPO = ("-m", "rl2.trainer.ppo")
# Answers wait for a time that depends on the process and the answer, and so does nothing else.
SLOW_LETTERS = """
    import asyncio
    import os

    async def reward_fn(messages, answer):
        reply = messages[-1]["content"]
        await asyncio.sleep(0.1 * (hash(reply) % 3))
        return sum(letter in answer for letter in reply) / max(len(reply), 1)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of what all runs share."""
    return tmp_path_factory.mktemp("overlap")


@pytest.fixture(scope="module")
def setup(data):
    """Arguments of a run of 6 steps, without its folder."""
    keys = letter_run(data, make_model(data / "tiny"))
    first_rows = (data / "train.jsonl").read_text().splitlines(keepends=True)[:5]
    (data / "test.jsonl").write_text("".join(first_rows))
    (data / "slow.py").write_text(textwrap.dedent(SLOW_LETTERS))
    return [
        *keys,
        "data.prompts_per_rollout=3",
        "data.responses_per_prompt=4",
        "rollout.max_running=16",
        "trainer.max_steps=6",
        "trainer.save_tokens=true",
    ]


def train(world, folder, *arguments, **options):
    return launch(world, *PPO, *arguments, f"trainer.save_dir={folder}", **options)


@pytest.fixture(scope="module")
def with_tests(data, setup):
    """Arguments of a run that evaluates, filters and keeps its checkpoints."""
    return [
        *setup,
        f"data.test_path={data / 'test.jsonl'}",
        "trainer.test_freq=2",
        "rollout.test_sampling_params.max_new_tokens=8",
        "rollout.filter=[0.0,0.9]",
        "trainer.save_freq=1",
        "trainer.keep_checkpoints=null",
    ]


@pytest.fixture(scope="module")
def fast(data, with_tests):
    """(arguments of a run two steps ahead, its folder)."""
    keys = ["rollout.max_staleness=2", "actor.update_per_rollout=2", "actor.correction=token_tis"]
    arguments = [*with_tests, *keys]
    train(2, data / "fast", *arguments, "rollout.num_processes=1")
    return arguments, data / "fast"


def read_bits(folder):
    """All that must be equal: metrics, transcripts, tokens and weights, by name."""
    files = {"metrics": read_untimed_metrics(folder)}
    for path in sorted(folder.glob("rollouts/*/step_*.jsonl")):
        files[str(path.relative_to(folder))] = read_jsonl(path)
    for path in [folder / "model/model.safetensors", *folder.glob("rollouts/*/*.safetensors")]:
        tensors = load_file(path)
        files[str(path.relative_to(folder))] = {name: t.tolist() for name, t in tensors.items()}
    return files


def versions_of(folder, step):
    """The updates that the weights had which sampled the answers of a training step."""
    records = read_jsonl(folder / f"rollouts/train/step_{step}.jsonl")
    return {version for record in records for version, _ in record["versions"]}


def test_a_rollout_is_of_weights_of_one_age(fast, with_tests, data, tmp_path):
    """Timing and the number of processes that sample change no bit."""
    arguments, folder = fast
    for step in range(1, 7):
        assert versions_of(folder, step) == {2 * max(0, step - 3)}
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == list(range(7))
    assert [line.get("rollout/staleness") for line in lines[1:]] == [0, 2, 4, 4, 4, 4]
    assert all(line["actor/mismatch_logp_difference"] > 1e-4 for line in lines[2:])
    assert [line["step"] for line in lines if "test/reward/mean" in line] == [0, 2, 4, 6]
    assert lines[-1]["reward/mean"] > 1.5 * lines[1]["reward/mean"], "it learns nothing"
    expected = read_bits(folder)
    assert len(expected) == 1 + 6 + 4 + 6 + 1
    slow = [f"rollout.env_path={data / 'slow.py'}", "rollout.num_processes=2"]
    train(3, tmp_path / "slow", *arguments, *slow, "trainer.save_freq=null")
    others = read_bits(tmp_path / "slow")
    # The first evaluation and rollout are those of a run whose processes all do both.
    keys = ["rollout.exact=false", "trainer.max_steps=1"]
    train(1, tmp_path / "together", *with_tests, *keys)
    together = read_bits(tmp_path / "together")
    for name in ("rollouts/train/step_1.jsonl", "rollouts/test/step_0.jsonl"):
        texts = [[record["messages"] for record in bits[name]] for bits in (expected, together)]
        assert texts[0] == texts[1]
    for bits in (expected, others):  # two samplers add the terms of means in another order
        del bits["metrics"]
    assert others == expected


def test_updates_are_those_of_a_run_on_the_same_rollouts(setup, tmp_path):
    """Without a correction the ratio is to the policy that sampled, as in trainer.rollouts_from."""
    arguments = [*setup, "actor.correction=none", "trainer.max_steps=3"]
    train(2, tmp_path / "run", *arguments, "rollout.num_processes=1")
    assert versions_of(tmp_path / "run", 3) == {1}, "a rollout runs a step ahead by default"
    ratios = [line["actor/ratio"] for line in read_metrics(tmp_path / "run")]
    assert [abs(ratio - 1) > 1e-4 for ratio in ratios] == [False, True, True]
    train(1, tmp_path / "again", *arguments, f"trainer.rollouts_from={tmp_path / 'run'}")
    assert same_weights(tmp_path / "again/model", tmp_path / "run/model")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "keys",
    [["rollout.max_staleness=2"], ["actor.lora_rank=2", "rollout.check_weights=true"]],
    ids=["weights", "adapters"],
)
def test_the_trainers_layout_changes_little(setup, tmp_path, keys):
    arguments = [*setup, *keys, "rollout.num_processes=1", "trainer.max_steps=3"]
    train(2, tmp_path / "one", *arguments)
    expected = read_metrics(tmp_path / "one")
    for layout in ("fsdp_size", "tp_size"):
        train(3, tmp_path / layout, *arguments, f"actor.{layout}=2", "trainer.save_freq=1")
        for a, b in zip(expected, read_metrics(tmp_path / layout), strict=True):
            assert a["actor/loss"] == pytest.approx(b["actor/loss"], abs=1e-4), layout
            assert a["reward/mean"] == pytest.approx(b["reward/mean"], abs=1e-6), layout


def check_resumed(whole, arguments, folder):
    """Runs from the checkpoints of steps 1 and 3 end with the bits of the whole run."""
    expected = read_bits(whole)
    for step in (1, 3):
        start = f"trainer.resume={whole / 'checkpoints'}/step_{step}"
        train(2, folder / f"from_{step}", *arguments, "rollout.num_processes=1", start)
        bits = read_bits(folder / f"from_{step}")
        later = [line for line in expected["metrics"] if line["step"] > step]
        assert bits.pop("metrics") == later
        assert bits.items() <= expected.items()
        assert "model/model.safetensors" in bits


def test_a_run_resumes_with_the_rollouts_that_were_sampled_ahead(fast, tmp_path):
    arguments, whole = fast
    check_resumed(whole, arguments, tmp_path)


@pytest.mark.nightly
def test_a_run_with_adapters_resumes(with_tests, tmp_path):
    arguments = [*with_tests, "actor.lora_rank=2", "trainer.max_steps=4"]
    train(2, tmp_path / "whole", *arguments, "rollout.num_processes=1")
    check_resumed(tmp_path / "whole", arguments, tmp_path)


def test_a_failing_environment_ends_both_sides_with_one_message(setup, tmp_path):
    env = tmp_path / "broken.py"
    env.write_text(
        textwrap.dedent("""
            num_calls = 0

            def reward_fn(messages):
                global num_calls
                num_calls += 1
                if num_calls > 50:  # some are calls of the trial at the start
                    raise ValueError("the scale is broken")
                return 1.0
        """)
    )
    keys = [f"rollout.env_path={env}", "rollout.num_processes=1", "rollout.max_staleness=2"]
    done = train(2, tmp_path / "run", *setup, *keys, check=False)
    assert done.returncode != 0
    message = done.stderr.split("error")[-1]
    assert "the scale is broken" in message and "rl2/" not in message
    newest = sorted((tmp_path / "run/rollouts/train").glob("step_*.jsonl"))[-1]
    reasons = {record["finish_reason"] for record in read_jsonl(newest)}
    assert "failed" in reasons, "the transcripts of the failed rollout are lost"


class Recorded:
    """In the place of a link: its samplers answer with empty rollouts."""

    def __init__(self):
        self.sent = []

    def send(self, request):
        verb, arguments = request
        self.sent.append((verb, *arguments))

    def send_weights(self, named_tensors, waits):
        self.sent[-1] += ("waits" if waits else "goes on",)

    def receive_answer(self):
        handover = pickle.dumps(Handover([], rows_done=3))
        return pickle.dumps(((handover, b""), None))


def make_samplers(num_steps=9, max_staleness=1):
    return SamplerProcesses(Recorded(), num_steps, max_staleness, old_policy_is_sampler=True)


def test_the_trainers_requests_run_ahead_and_end_with_the_run():
    samplers = make_samplers(num_steps=5, max_staleness=2)
    sent = samplers.link.sent
    for step in range(1, 6):
        samplers.collect(step)
        samplers.load_weights((), step)
    assert sent == [
        *[("collect", step) for step in (1, 2, 3)],
        ("load_weights", 1, "goes on"),
        ("collect", 4),
        ("load_weights", 2, "goes on"),
        ("collect", 5),
        *[("load_weights", step, "goes on") for step in (3, 4)],
        ("load_weights", 5, "waits"),
    ]


def test_sending_waits_for_nobody():
    store = dist.HashStore()
    with ThreadPoolExecutor() as threads:
        sender, receiver = threads.map(lambda rank: Channel(store, rank, 2), (0, 1))
    values = [(i, bytes(2**16 * i)) for i in range(8)]
    sending = threading.Thread(target=lambda: [sender.send(v) for v in values], daemon=True)
    sending.start()
    sending.join(timeout=30)
    assert not sending.is_alive()
    assert sender.pending
    assert [pickle.loads(receiver.receive()) for _ in values] == values
    sender.flush()
    assert not sender.pending


def test_a_resumed_run_requests_what_its_checkpoint_does_not_hold():
    samplers = make_samplers(max_staleness=3)
    samplers.collect(1)
    state = samplers.state_dict()
    for lag, requested in ((3, [5]), (1, []), (5, [5, 6, 7])):
        resumed = make_samplers(max_staleness=lag)
        resumed.load_state_dict(state)
        resumed.collect(2)
        assert resumed.link.sent == [("collect", step) for step in requested]


@pytest.mark.nightly
def test_a_step_of_an_overlapped_run_is_replayed(setup, tmp_path):
    keys = ["rollout.num_processes=1", "trainer.save_freq=2"]
    train(2, tmp_path / "run", *setup, *keys)
    words = (tmp_path / "run", "--step", "4", "--out", tmp_path / "again")
    done = launch(2, "-m", "rl2", "replay", *words)
    assert "equal" in done.stdout or "same" in done.stdout, done.stdout
