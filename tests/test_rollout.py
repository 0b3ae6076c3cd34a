"""Tests of trajectories with a scripted engine: masks, rewards, several turns, failures."""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import replace
from datetime import date

import faulty_async_env
import faulty_env
import faulty_process_env
import pytest
import torch
from env_helpers import make_agent, make_play, play, wait_until
from scripted import PARAMS, ScriptedEngine, make_row, process_group, train_rows  # noqa: F401

from rl2 import progress
from rl2.batch import Batch, Sample, collate
from rl2.data.examples import Example
from rl2.env.load import load_env
from rl2.rollout.collect import StepGroups
from rl2.rollout.filter import FilteredSchedule
from rl2.rollout.stats import (
    add_ages,
    summarise,
    summarise_groups,
    summarise_sources,
    take_samples,
    to_records,
)
from rl2.rollout.trajectory import FilterStatus, FinishReason, Trajectory, begin_group, place_reward

SAY_X = ["x"] * 3
ROWS = [make_row(i) for i in range(9)]
ANSWER_ENV = "def reward_fn(messages, answer): return float(answer)"
TOOL_ENV = """
    def interact(messages):
        call = messages[-1]["content"]
        return [{"role": "tool", "content": call[1:] + "!"}] if call.startswith("=") else []
    def reward_fn(messages, answer):
        return {"right": 1.0, "turns": 0.25 * sum(m["role"] == "assistant" for m in messages)}
"""


def test_length_limits_end_a_trajectory(tmp_path, monkeypatch, capsys):
    collector, prompts, _ = make_agent(tmp_path, lambda *_: ("=1", "length"), TOOL_ENV)
    capsys.readouterr()
    monkeypatch.setattr(progress, "LINE_SECONDS", -1)  # a line for each group
    assert collector.play(prompts, PARAMS, 1, "train", 1)[0].num_turns == 1
    collector.play(prompts, PARAMS, 1, "test", 1)
    titles = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert sorted(set(titles)) == ["rollout", "test"] and titles[0] == "rollout"
    (trajectory,), _ = play(tmp_path, ["=1"] * 9, TOOL_ENV, max_turns=9, max_length=90)
    assert 1 < trajectory.num_turns < 9 and trajectory.finish_reason == "length"
    assert len(trajectory.samples[0].tokens) <= 90 and sum(trajectory.samples[0].rewards) > 0


@pytest.mark.parametrize("deterministic", [True, False])
def test_groups_are_complete_and_ordered_and_every_request_has_its_own_seed(
    tmp_path, deterministic
):
    collector, prompts, player = make_agent(tmp_path, SAY_X, ANSWER_ENV, num_prompts=9)
    collector.deterministic = deterministic
    trajectories = collector.play(prompts, PARAMS, 3, "train", 5)
    assert [t.id for t in trajectories] == list(range(27))
    assert [t.group for t in trajectories] == [i // 3 for i in range(27)]
    assert [t.reward for t in trajectories] == [float(i // 3) for i in range(27)]
    engine = player.engine
    seeds = {seed for seed, _ in engine.requests}
    assert len(seeds) == 27 and engine.max_num_running >= 6
    test_trajectories = collector.play(prompts, PARAMS, 3, "test", 5)
    test_seeds = {seed for seed, _ in engine.requests[27:]}
    assert len(test_trajectories) == 27 and not test_seeds & seeds
    again = collector.play(prompts, PARAMS, 3, "train", 5)
    assert [t.reward for t in again] == [t.reward for t in trajectories]
    assert {seed for seed, _ in engine.requests[54:]} == seeds


@pytest.mark.parametrize("deterministic", [True, False])
def test_slots_are_filled_while_trajectories_wait_for_the_environment(tmp_path, deterministic):
    """The environment answers when all 24 trajectories wait for it. The engine has 4 slots."""
    env = """
        import asyncio
        num_waiting = 0
        async def interact(messages):
            global num_waiting
            num_waiting += 1
            while num_waiting < 24:
                await asyncio.sleep(0.01)
            return []
        def reward_fn(messages, answer): return float(answer)
    """
    collector, prompts, player = make_agent(tmp_path, SAY_X, env, num_prompts=12)
    collector.deterministic = deterministic
    trajectories = collector.play(prompts, PARAMS, 2, "train", 1)
    assert [t.reward for t in trajectories] == [float(i // 2) for i in range(24)]
    # A deterministic engine has all requests; another one few more than its slots, since the next
    # group may be for another engine.
    most = 24 if deterministic else 6
    assert 4 < player.engine.max_num_running <= most


def test_a_trajectory_that_was_cancelled_is_not_trained(tmp_path):
    def cancel(turn, seed):
        raise asyncio.CancelledError

    collector, prompts, _ = make_agent(tmp_path, cancel, ANSWER_ENV)
    with pytest.raises(AssertionError, match="cancelled"):
        collector.play(prompts, PARAMS, 1, "train", 1)


def test_an_engine_that_fails_ends_the_rollout_at_once(tmp_path):
    collector, prompts, player = make_agent(tmp_path, lambda *_: 1 / 0, ANSWER_ENV, 40)
    collector.deterministic = False
    with pytest.raises(ZeroDivisionError):
        collector.play(prompts, PARAMS, 1, "train", 1)
    assert len(player.engine.requests) < 10


def test_too_many_failures_stop_the_run_with_the_reason(tmp_path):
    """The trajectories of the step are written before."""
    env = "def reward_fn(messages, answer): return 1 / int(answer)"
    collector, prompts, player = make_agent(tmp_path, SAY_X, env, num_prompts=2)
    player.failures.max_fraction = 0.4
    written = []
    collector.write_records = lambda split, step, records: written.append([split, step, *records])
    message = r"2 of 4 .*max_env_failures=0.4(.|\n)*ZeroDivisionError"
    with pytest.raises(RuntimeError, match=message):
        collector.play(prompts, PARAMS, 2, "train", 7)
    [[split, step, *records]] = written
    assert (split, step) == ("train", 7)
    assert [record["finish_reason"] for record in records] == ["failed"] * 2 + ["stop"] * 2
    assert all(record["messages"][-1]["content"] == "x" for record in records)


def test_messages_that_the_template_refuses_are_a_failure_of_the_environment(tmp_path, caplog):
    """Their messages differ, but the refusal is of one kind, so it is logged once."""
    collector, prompts, player = make_agent(tmp_path, ["=7"], TOOL_ENV, num_prompts=3)
    refusal = "{{ raise_exception('no tools here') if messages|length > 1 }}"
    player.engine.tokenizer.chat_template = refusal
    trajectories = collector.play(prompts, PARAMS, 1, "train", 1)
    assert [trajectory.finish_reason for trajectory in trajectories] == ["failed"] * 3
    assert player.failures.count == 3
    (logged,) = caplog.messages
    assert "no tools here" in logged and any(f"'q{i}'" in logged for i in range(3))


def test_a_paused_turn_keeps_its_tokens_and_continues_with_newer_weights(tmp_path):
    """A step takes two groups. Groups 2 and 3 are of the next step, and group 2 has 200 letters.

    Group 0 generates 20 letters and the others one. So group 2 is paused when group 0 ends.
    """
    text = "x" * 200
    env = """
        def reward_fn(messages, answer):
            return float(len(messages[-1]["content"]))
    """

    def script(turn, seed):
        return {0: "y" * 20, 2: text}.get(seed[3], "y"), "stop"

    _, _, player = make_agent(tmp_path, script, env)
    engine = player.engine
    engine.seconds = lambda seed: {0: 0.05, 2: 5.0 if engine.version == 0 else 0.05}.get(seed[3], 0)
    params = replace(PARAMS, max_new_tokens=300)
    options = {"params": params, "deterministic": False, "num_steps": 2, "partial": True}
    collector = train_rows(player, ROWS[:4], 2, **options)
    done = collector.collect(1)
    # In the order of the prompts, although the group of group 0's length ends last.
    assert [trajectory.group for trajectory in done] == [0, 0, 1, 1]
    assert [trajectory.reward for trajectory in done] == [20, 20, 1, 1]
    assert all(trajectory.versions == [(0, trajectory.reward + 1)] for trajectory in done)
    paused, other = collector.carried_over
    assert (paused.id, other.id) == (2, 3) and not paused.is_done
    partial_tokens = [list(trajectory.samples[0].tokens) for trajectory in paused.trajectories]
    counts = [trajectory.partial_tokens for trajectory in paused.trajectories]
    assert all(0 < count < 200 for count in counts)
    state = collector.state_dict()
    collector = train_rows(player, ROWS[:4], 2, **options)
    collector.load_state_dict(state)  # as a resumed run does
    engine.version = 1
    done = collector.collect(2)
    assert not collector.carried_over and len(done) == 4
    for trajectory, tokens, count in zip(done[:2], partial_tokens, counts, strict=True):
        (sample,) = trajectory.samples
        assert list(sample.tokens[: len(tokens)]) == tokens and trajectory.reward == 200
        assert trajectory.messages[-1]["content"] == text and trajectory.num_turns == 1
        assert trajectory.versions == [(0, count), (1, 201 - count)] and sum(sample.mask) == 201
        versions = [int(-logp // 100) for logp in sample.logps if logp]
        assert versions == [0] * count + [1] * (201 - count)
    continued = [
        (seed, params.max_new_tokens)
        for (seed, _), params in zip(engine.requests, engine.params, strict=True)
        if seed[2:4] == (2, 2)
    ]
    assert [number for _, number in sorted(continued)] == [300 - count for count in counts]
    seeds = {seed for seed, _ in engine.requests}
    assert len(seeds) == len(engine.requests), "two requests had the same seed"
    metrics = summarise(done, 1)
    # The two tokens of each answer of group 3 are all from before the update.
    assert metrics["rollout/staleness"] == pytest.approx((sum(counts) + 4) / (2 * 201 + 4))
    batch = collate(take_samples(done))
    add_ages(batch, done, 1)
    ages = [batch.ages[row][batch.mask[row] > 0].tolist() for row in range(4)]
    assert ages[:2] == [[1] * count + [0] * (201 - count) for count in counts]
    assert ages[2:] == [[1, 1]] * 2 and not batch.ages[batch.mask == 0].any()


def module_of(player):
    """The module of the env file."""
    return sys.modules[player.envs[""].spec.reward_fn.__module__]


WAITING_ENV = """
    import time
    begun, ended, held = [], [], set()
    def call(name, messages):
        question = messages[0]["content"]
        begun.append((name, question))
        try:
            while (name, question) in held:
                time.sleep(0.005)
        finally:
            ended.append((name, question))
    def interact(messages):
        call("interact", messages)
        return [{"role": "tool", "content": "t"}] if len(messages) < 4 else []
    def reward_fn(messages, answer):
        call("reward_fn", messages)
        return float(len(messages))
    def group_reward_fn(trajectories):
        call("group_reward_fn", trajectories[0]["messages"])
        return [0.5 for _ in trajectories]
"""


@pytest.mark.parametrize("name", ["interact", "reward_fn", "group_reward_fn"])
def test_a_step_waits_for_calls_that_run_for_the_next_step(tmp_path, name):
    """Only tokens pause: a call for group 2 ends in the step that began it, and is not repeated."""
    _, _, player = make_agent(tmp_path, SAY_X, WAITING_ENV)
    options = {"deterministic": False, "num_steps": 12, "partial": True}
    collector = train_rows(player, ROWS[:3], 2, 1, **options)
    engine = player.engine
    module = module_of(player)
    call = (name, "q2")
    module.held.add(call)
    abort = engine.abort

    async def generate_when_the_call_runs(prompt, params, seed):
        if seed[3] == 0:
            while call not in module.begun:
                await asyncio.sleep(0.005)
        return await ScriptedEngine.generate(engine, prompt, params, seed)

    def abort_and_release():
        abort()
        engine.loop.call_later(0.2, module.held.clear)

    engine.generate, engine.abort = generate_when_the_call_runs, abort_and_release
    done = collector.collect(11)
    assert [t.group for t in done] == [0, 1] and [t.num_turns for t in done] == [2, 2]
    assert module.begun.count(call) == module.ended.count(call) == 1
    group = collector.carried_over[0]
    [trajectory] = group.trajectories
    if name == "interact":  # the turn that follows has not begun
        assert trajectory.num_turns == 1 and trajectory.messages[-1]["role"] == "tool"
    else:
        assert group.is_scored and trajectory.rewards == {"reward": 4.0, "group": 0.5}
    trajectory, _ = collector.collect(12)
    assert trajectory.finish_reason == "stop" and trajectory.num_turns == 2
    assert trajectory.rewards == {"reward": 4.0, "group": 0.5}
    assert trajectory.length == sum(trajectory.samples[0].mask)
    assert Counter(name for name, question in module.begun if question == "q2") == {
        "interact": 2,
        "reward_fn": 1,
        "group_reward_fn": 1,
    }


def test_calls_of_groups_that_a_step_drops_are_cancelled(tmp_path, monkeypatch):
    _, _, player = make_agent(tmp_path, SAY_X, WAITING_ENV)
    module = module_of(player)
    module.held.add(("interact", "q2"))
    player.engine.abort = lambda: None
    collector = train_rows(player, ROWS[:3], 2, 1, filter=[0.0, 9.0], max_refills=1)
    with monkeypatch.context() as patch:  # as after a group outside the filter
        patch.setattr(FilteredSchedule, "start_limit", property(lambda _: 3))
        done = collector.collect(1)
    assert [t.group for t in done] == [0, 1]
    wait_until(lambda: ("interact", "q2") in module.ended, 10)
    assert module.held, "the call was ended, it did not return"
    module.held.clear()
    assert collector.cursor.position == 2
    assert [t.row["answer"] for t in collector.collect(2)][0] == "2"


def test_trajectories_of_a_run_with_other_samples_have_ids_of_their_own(tmp_path):
    """A resumed run may have another data.responses_per_prompt than its paused answers."""
    _, [prompt], player = make_agent(tmp_path, SAY_X, ANSWER_ENV)
    paused = [begin_group(5, prompt, 8), begin_group(6, prompt, 8, 8)]
    groups = StepGroups(paused, train_rows(player, ROWS, 3).cursor, samples_per_prompt=4)
    played = [groups.get(number) for number in range(4)]
    assert [group.id for group in played] == [5, 6, 7, 8]
    assert [t.id for group in played for t in group.trajectories] == list(range(24))


def test_a_record_has_the_mean_advantage_of_all_its_sequences(tmp_path):
    """Trajectory 4 has two sequences, with one and three trained tokens."""
    trajectories = [Trajectory(4, 0, []), Trajectory(3, 0, [])]
    batch = Batch(
        tokens=torch.zeros(3, 4),
        engine_logps=torch.zeros(3, 3),
        rewards=torch.zeros(3, 3),
        mask=torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.int8),
        group=torch.zeros(3),
        trajectory=torch.tensor([4, 4, 3]),
        advantages=torch.tensor([[2.0, 9, 9], [1, 1, 0], [5, 5, 5]]),
    )
    records = list(to_records(trajectories, batch))
    assert [(record["id"], record["advantage"]) for record in records] == [(3, 0), (4, 1)]
    assert "advantage" not in next(to_records(trajectories))


def ended(number, group, rewards, finish_reason=FinishReason.STOP, **others):
    return Trajectory(number, group, [], rewards=rewards, finish_reason=finish_reason, **others)


def test_metrics_by_source():
    """Those of a source are the metrics of a rollout that has its trajectories alone."""
    passed, rejected = FilterStatus.PASSED, FilterStatus.REJECTED
    maths = [
        ended(0, 0, {"right": 1.0}, source="maths", filter_status=passed),
        ended(2, 1, {"right": 0.0}, source="maths", filter_status=rejected),
    ]
    code = [ended(4, 2, {"right": 0.25}, source="code", filter_status=passed)]
    expected = {}
    for source, members in (("maths", maths), ("code", code)):
        alone = summarise(members, 0) | summarise_groups(members)
        expected |= {f"sources/{source}/{name}": value for name, value in alone.items()}
    unnamed = ended(6, 3, {"right": 1.0})
    assert summarise_sources([maths[0], *code, maths[1], unnamed], 0) == expected
    assert expected["sources/maths/rollout/filtered"] == expected["sources/maths/reward/mean"]
    again = Trajectory.from_record(maths[0].record())
    assert again.source == "maths" and "source" not in unnamed.record()


def test_reward_parts_do_not_overwrite_the_metrics_of_the_reward():
    parts = [{"mean": 3.0, "std": 5.0, "right": 1.0}, {"mean": 5.0, "std": 7.0, "reward": 2.0}]
    trajectories = [ended(i, 0, rewards) for i, rewards in enumerate(parts)]
    metrics = {k: v for k, v in summarise(trajectories, 0).items() if k.startswith("reward/")}
    assert metrics == {
        "reward/mean": 11.5,
        "reward/std": 2.5,
        "reward/parts/mean": 4.0,
        "reward/parts/std": 6.0,
        "reward/right": 0.5,
        "reward/reward": 1.0,
    }
    for trajectory in trajectories:
        trajectory.rewards = {"reward": 2.0}  # a plain number
    names = [name for name in summarise(trajectories, 0) if name.startswith("reward/")]
    assert names == ["reward/mean", "reward/std"]


def test_the_fraction_of_groups_of_equal_rewards():
    """Failed and filtered trajectories do not count; sums that are equal in float32 are equal."""
    rewards = {
        0: [{"a": 0.1, "b": 0.2}, {"a": 0.3}],  # equal: 0.1 + 0.2 is 0.3 in the batch
        1: [{"a": 0.0}, {"a": 1.0}],
        2: [{"a": 0.5}],  # a group of one
        3: [{"a": 0.5}, {"a": 0.5}, None],  # the last one failed
        4: [None, None],
    }
    trajectories = []
    for group, answers in rewards.items():
        for parts in answers:
            reason = FinishReason.STOP if parts else FinishReason.FAILED
            trajectories.append(ended(len(trajectories), group, parts or {}, reason))
    assert summarise_groups(trajectories)["rollout/zero_variance"] == pytest.approx(3 / 4)
    for trajectory in trajectories:
        if trajectory.group != 1:
            trajectory.filter_status = FilterStatus.REJECTED
    assert summarise_groups(trajectories)["rollout/zero_variance"] == 0
    assert summarise_groups(trajectories[-2:])["rollout/zero_variance"] == 1  # no group is left


def test_the_reward_lies_on_the_last_sampled_token():
    """An agent may end after a request that no answer came to."""
    samples = [
        Sample([1, 2, 3], [0, 1, 1], [0.0] * 3, [0.0, 0.0, 0.5], 0, 7),
        Sample([1, 2, 3, 4], [0, 1, 1, 0], [0.0] * 4, [0.0] * 4, 0, 7),
        Sample([1, 2], [0, 0], [0.0] * 2, [0.0] * 2, 0, 7),
    ]
    rewards = {"turns": 0.5, "right": 2.0}
    trajectory = Trajectory(7, 0, [], samples=samples, rewards=rewards)
    place_reward(trajectory)
    assert trajectory.samples == samples[:2]
    assert [list(sample.rewards) for sample in samples] == [[0, 0, 0.5], [0, 0, 2, 0], [0, 0]]


def test_a_record_has_the_columns_of_its_row():
    """They can be written as JSON, whatever they are, and long ones are cut."""
    image = b"\xff" * 9999
    row = {
        "messages": [{"role": "user", "content": "x"}],
        "answer": "5",
        "extra_info": {"index": 3, "split": "train"},
        "length": 7,  # a name that the record has too
        "when": date(2026, 11, 22),
        "pairs": {(1, 2): 3},
        "image": image,
        "note": "x" * 2000,
    }
    group = begin_group(0, Example(0, row, [([1, 2], [])]), num_samples=1)
    [record] = to_records(group.trajectories)
    columns = json.loads(json.dumps(record))["row"]
    assert columns.pop("image").startswith(str(image)[:50]) and len(str(record)) < 6000
    assert columns == {
        "answer": "5",
        "extra_info": {"index": 3, "split": "train"},
        "length": 7,
        "when": "2026-11-22",
        "pairs": "{(1, 2): 3}",
        "note": row["note"],  # no longer than may be
    }
    assert record["messages"] == row["messages"] and record["length"] == 0


@pytest.mark.parametrize(
    "env_file, isolation, num_turns",
    [
        (faulty_env, "thread", 2),
        (faulty_async_env, "thread", 2),
        # Of one turn: a process that ends takes the state of other conversations with it.
        (faulty_process_env, "process", 1),
    ],
)
def test_every_fault_of_an_env_costs_its_trajectory_and_nothing_else(
    tmp_path, env_file, isolation, num_turns
):
    """Each tenth row has a fault, of another kind each time.

    Async functions that block their event loop are not among them: they cost other trajectories.
    """
    rows = []
    for fault in env_file.FAULTS:
        rows += [{**make_row(len(rows) + i), "fault": "" if i else fault} for i in range(10)]
    # A process or a loop that the machine does not run for a while must not be taken for one that
    # hangs: on a loop, all calls would be late.
    env = load_env(env_file.__file__, timeout=2.0, concurrency=4, isolation=isolation)
    collector, prompts, player = make_play(env, SAY_X, rows, max_turns=2 * num_turns - 1)
    trajectories = collector.play(prompts, PARAMS, 1, "train", 31)
    assert len(trajectories) == len(rows) == 10 * len(env_file.FAULTS)
    failed = [t.row["fault"] for t in trajectories if t.finish_reason == "failed"]
    assert failed == list(env_file.FAULTS) and player.failures.count == len(failed)
    metrics = summarise(trajectories, 0)
    assert metrics["rollout/failed"] == pytest.approx(0.1) and metrics["reward/mean"] == 1.0
    trained = [sum(sample.mask) > 0 for sample in take_samples(trajectories)]
    assert trained == [not t.row["fault"] for t in trajectories]
    assert not any(t.samples for t in trajectories), "they keep the memory"
    assert [t.length > 0 for t in trajectories] == trained
    done = [trajectory for trajectory in trajectories if not trajectory.row["fault"]]
    assert all(t.num_turns == num_turns and t.rewards == {"caf\ufffd": 1.0} for t in done)
    answer = [{"role": "tool", "content": "caf\ufffd"}] * (num_turns - 1)
    assert all(t.messages[2:3] == answer for t in done)
    json.dumps(list(to_records(trajectories)), ensure_ascii=False).encode()
    env.close()
