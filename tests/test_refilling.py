"""Tests of which groups a step trains, with scripted engines: rollout.filter, its refills and
order, max_staleness, and what is added to the rewards."""

import asyncio
import json
import math
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from common import ROOT, launch
from hypothesis import given, settings
from hypothesis import strategies as st
from refilling import PARTIAL, make_collector, rows_of
from scripted import PARAMS, process_group  # noqa: F401

from rl2.batch import collate
from rl2.config.schema import PPOConfig
from rl2.engine.base import SamplingParams
from rl2.report.health import Health
from rl2.rewards.text import overlong_score
from rl2.rollout.filter import FilteredSchedule
from rl2.rollout.play import Rollout
from rl2.rollout.schedule import GroupBoard, GroupSchedule
from rl2.rollout.shape import add_overlong
from rl2.rollout.stats import add_ages, mask_truncated, summarise, summarise_groups, take_samples
from rl2.rollout.trajectory import FinishReason, Trajectory

SOME = [0.0, 1.0]  # rollout.filter: some answers are right and some are wrong
# The rows that the steps of refilling.THREE_STEPS train, and those that they filter.
ROWS = [([1, 3, 5], [0, 2, 4]), ([6, 7, 10], [8, 9]), ([1, 3, 5], [11, 0, 2, 4])]


def test_more_groups_are_in_play_than_are_missing_and_the_rest_is_dropped(tmp_path):
    """Rows 0 to 3 are filtered. While they are replaced, others begin that are not needed."""
    num_right = [0, 0, 0, 0] + [1] * 20
    seconds = {row: 5.0 for row in range(8, 24)}
    collector = make_collector(tmp_path, num_right, seconds, 4, filter=SOME, max_refills=3)
    engine, env = collector.player.engine, collector.player.envs[""]
    env.end = mock.AsyncMock(wraps=env.end)
    trajectories = collector.collect(1)
    assert rows_of(trajectories) == ([4, 5, 6, 7], [0, 1, 2, 3])
    # 4 are missing after 4 of 4 were filtered, so 8 more began; 4 of them were aborted.
    assert set(engine.requested_rows) == set(range(12)) and engine.num_aborted == 8
    assert collector.cursor.position == 8 and not collector.carried_over
    dropped = [mock.call(("train", trajectory)) for trajectory in range(16, 24)]
    assert [call for call in env.end.mock_calls if call in dropped] == dropped, "it was not told"


@settings(deadline=None)
@given(
    scores=st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan]), min_size=15, max_size=15),
    num_ahead=st.integers(0, 3),
    filter=st.sampled_from([SOME, ()]),
    random=st.randoms(use_true_random=False),
)
def test_a_step_uses_the_same_groups_in_whichever_order_they_end(scores, num_ahead, filter, random):
    """It needs 4, with a filter of at most 12. Its bounds do not pass, nor a failed group."""
    max_used = 12 if filter else 4
    schedule = GroupSchedule(4, num_ahead)
    if filter:
        schedule = FilteredSchedule(4, num_ahead, bounds=filter, max_refills=2)
    passing = [number for number in range(max_used) if not filter or scores[number] == 0.5]
    num_used = passing[3] + 1 if len(passing) > 3 else max_used
    assert schedule.may_start_unused == bool(filter or num_ahead)
    assert schedule.num_used == (None if filter else 4)
    done, num_started = schedule.mean_scores, 0
    while not schedule.is_complete:
        assert schedule.num_used in (None, num_used)
        num_rejected = sum(bool(filter) and score != 0.5 for score in done.values())
        num_missing = max(0, 4 + num_ahead - (len(done) - num_rejected))
        in_play = num_missing + min(num_missing, num_rejected)
        assert schedule.start_limit == min(len(done) + in_play, max_used + num_ahead)
        num_started = max(num_started, schedule.start_limit)
        number = random.choice([number for number in range(num_started) if number not in done])
        done[number] = scores[number]
    assert schedule.num_used == num_used and done.keys() >= set(range(num_used))


def test_a_process_without_an_engine_learns_where_the_step_ends(tmp_path):
    """It plays nothing. The other process has finished three groups when it looks."""
    collector = make_collector(tmp_path, [1] * 4, {}, 2, filter=SOME, max_refills=1)
    collector.player.engine.index = None
    schedule = FilteredSchedule(num_needed=2, bounds=SOME, max_refills=1)
    board = GroupBoard()
    for number, mean_score in enumerate([0.5, 0.0, 0.5]):
        board.post(number, mean_score)
    rollout = Rollout(
        collector.player,
        schedule,
        board,
        get_group=None,
        params=PARAMS,
        seed=(0,),
        deterministic=True,
        keeps_unused=False,
        bar=None,
    )
    collector.player.engine.loop.run_until_complete(rollout.play())
    assert schedule.num_used == 3 and not rollout.begun
    board.clear()
    assert not board.read()


def test_an_env_whose_groups_are_all_equal_ends_the_run_in_words(tmp_path):
    """The batch of a step without a group has one row, in which nothing is trained."""
    collector = make_collector(tmp_path, [0, 2], {}, 2, filter=SOME, max_refills=2)
    config = PPOConfig()
    config.data.prompts_per_rollout = config.data.responses_per_prompt = 2
    config.rollout.filter = SOME
    config.rollout.max_refills = 2
    health = Health(tmp_path, config, 0)
    for step in (1, 2, 3):
        health.stop_if_diverged()
        trajectories = collector.collect(step)
        assert rows_of(trajectories) == ([], [0, 1]) and len(trajectories) == 12
        batch = collate(take_samples(trajectories))
        add_ages(batch, trajectories, 1)
        assert batch.mask.tolist() == batch.ages.tolist() == [[0]]
        metrics = summarise(trajectories, 0) | summarise_groups(trajectories)
        assert metrics["rollout/filtered"] == 1 and metrics["rollout/groups"] == 0
        assert metrics["reward/mean"] == 0.5, "of all groups that were played"
        health.check({**metrics, "actor/lr": 0.1, "actor/grad_norm": 0.0, "step": step})
    with pytest.raises(RuntimeError, match=r"no group was within rollout.filter.*3 x data"):
        health.stop_if_diverged()


def test_the_filter_sees_a_group_when_all_its_rewards_are_there(tmp_path, monkeypatch):
    """The reward of the first answer comes long after its last token."""
    collector = make_collector(tmp_path, [2, 1], {}, 1, filter=SOME, max_refills=1)
    env = collector.player.envs[""]
    score = env.score

    async def score_first_one_late(messages, row, key, inputs):
        if key[1] % 2 == 0:
            await asyncio.sleep(0.3)
        return await score(messages, row, key, inputs)

    monkeypatch.setattr(env, "score", score_first_one_late)
    assert rows_of(collector.collect(1)) == ([1], [0])


def test_a_group_whose_environment_failed_is_replaced(tmp_path):
    collector = make_collector(tmp_path, [1, None, 1], {}, 2, filter=SOME, max_refills=1)
    collector.player.failures.max_fraction = 0.5
    assert rows_of(collector.collect(1)) == ([0, 2], [1])


@pytest.mark.parametrize("partial", [False, True])
def test_a_resumed_collector_refills_from_the_same_prompts(tmp_path, partial):
    num_right = [2, 1, 0, 1, 2, 1, 1, 1, 0, 0, 1]
    options = {"filter": SOME, "max_refills": 4, **(PARTIAL if partial else {})}

    def make():
        return make_collector(tmp_path, num_right, {}, 2, **options)

    expected, resumed = make(), make()
    for step in range(1, 6):
        rows = rows_of(expected.collect(step))
        assert rows_of(resumed.collect(step)) == rows
        state = resumed.state_dict()
        resumed = make()
        resumed.load_state_dict(state)
    assert resumed.rows_done == 10


def test_with_partial_rollouts_what_is_behind_the_last_group_goes_on_in_the_next_step(tmp_path):
    num_right = [0, 1, 1, 1, 1, 0, 1, 1]
    options = {**PARTIAL, "filter": SOME, "max_refills": 2}
    collector = make_collector(tmp_path, num_right, {3: 5.0}, 2, **options)
    engine = collector.player.engine
    assert rows_of(collector.collect(1)) == ([1, 2], [0])
    carried = [group.prompt.index for group in collector.carried_over]
    assert carried[0] == 3 and not collector.carried_over[0].is_done
    assert collector.cursor.position == 3 + len(carried)
    engine.version = 1
    trajectories = collector.collect(2)
    assert rows_of(trajectories) == ([3, 4], [])
    assert [t.versions for t in trajectories[:2]] == [[(0, 1), (1, 1)]] * 2, "it was begun anew"
    assert rows_of(collector.collect(3)) == ([6, 7], [5])


def test_answers_that_are_too_old_are_sampled_anew(tmp_path):
    for max_staleness, versions in ((1, {7}), (2, {5, 7})):
        options = {**PARTIAL, "max_staleness": max_staleness}
        collector = make_collector(tmp_path, [1] * 8, {2: 1.0}, 2, **options)
        engine = collector.player.engine
        engine.version = 5
        collector.collect(1)
        assert not collector.carried_over[0].is_done
        engine.version = 7  # two updates later
        trajectories = collector.collect(2)
        assert rows_of(trajectories) == ([2, 3], []) and len(trajectories) == 4
        assert {version for t in trajectories for version, _ in t.versions} == versions
        assert [t.id for t in trajectories] == [4, 5, 6, 7]
        assert all(sum(t.samples[0].mask) == t.length for t in trajectories)


def test_the_score_is_what_the_filter_reads(tmp_path):
    """The rewards of all answers are 1, whatever is right: 2, 1 and 0 answers of the rows are."""
    options = {"filter": SOME, "max_refills": 2}

    def collect(score):
        collector = make_collector(tmp_path, [2, 1, 0], {}, 1, **options)
        score_answer = collector.player.envs[""].score

        async def add_style(messages, row, key, inputs):
            right = (await score_answer(messages, row, key, inputs))["right"]
            return {"right": right, "style": 1.0 - right}

        collector.player.envs[""].score = add_style
        collector.player.score = score
        return rows_of(collector.collect(1))

    assert collect(None) == ([], [0, 1, 2])
    assert collect("right") == ([1], [0])
    with pytest.raises(ValueError, match=r"rollout.score=wrong: .* right, style"):
        collect("wrong")


def test_the_overlong_part_is_the_formula_of_dapo(tmp_path):
    """Equation 13 with a limit of 20 tokens and a buffer of 4: 0 up to 16, -1 at 20."""
    lengths = [1, 16, 17, 18, 20, 40]
    assert [overlong_score(n, 20, 4) for n in lengths] == [0, 0, -0.25, -0.5, -1, -1]
    params = SamplingParams(max_new_tokens=20, stop_token_ids=(2,))
    shape = partial(add_overlong, buffer=4, penalty=0.4, max_new_tokens=20)
    options = {"shapes": [shape], "params": params}
    collector = make_collector(tmp_path, [1, 2], {}, 2, filter=SOME, max_refills=1, **options)
    collector.player.engine.lengths = {0: 18, 1: 18}
    collector.player.reward_weights = {"overlong": 0.5}
    trajectories = collector.collect(1)
    right, wrong, *filtered = trajectories[:4]
    assert right.rewards == {"right": 1.0, "overlong": -0.2} and right.reward == 0.9
    assert wrong.reward == -0.1 and list(wrong.samples[0].rewards)[-1] == pytest.approx(-0.1)
    assert [t.is_rejected for t in filtered] == [True, True], "by the reward without the penalty"
    assert all(t.rewards["overlong"] == -0.2 for t in filtered), "the metric is of all groups"


def test_reward_weights_scale_the_parts_and_a_wrong_name_is_refused(tmp_path):
    collector = make_collector(tmp_path, [1], {}, 1)
    collector.player.reward_weights = {"right": 0.5, "turns": 2.0}  # no turn has earned any yet
    right, wrong = collector.collect(1)
    assert right.rewards == {"right": 1.0} and (right.reward, wrong.reward) == (0.5, 0.0)
    assert right.samples[0].rewards[-1] == 0.5 and right.record()["reward"] == 0.5
    collector = make_collector(tmp_path, [1], {}, 1)
    collector.player.reward_weights = {"rigth": 0.5}
    with pytest.raises(ValueError, match=r"reward_weights.rigth: .* the parts are right"):
        collector.collect(1)
    weighted = Trajectory(0, 0, [], rewards={"a": 3.0, "b": 5.0}, weights={"a": 0.0})
    assert weighted.reward == 5.0


def test_truncated_answers_are_masked_after_the_advantages(tmp_path):
    collector = make_collector(tmp_path, [1, 1], {}, 2)
    trajectories = collector.collect(1)
    trajectories[2] = replace(trajectories[2], finish_reason=FinishReason.LENGTH)
    batch = collate(take_samples(trajectories))
    before = batch.mask.clone()
    mask_truncated(batch, trajectories)
    before[2] = 0
    assert torch.equal(batch.mask, before) and before.any(1).tolist() == [True, True, False, True]


def test_two_processes_take_the_same_groups_as_one(tmp_path):
    """Of equal and unequal speed, without and with partial rollouts. Every process has the same."""
    done = launch(2, ROOT / "tests/refilling.py", tmp_path, timeout=60)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == 3
    for result in results:
        first, second = result["ranks"]
        assert first == second, "the processes differ"
        if "partial" not in result["options"]:
            assert [tuple(rows) for rows in first["rows"]] == ROWS and first["position"] == 18


def test_a_group_that_starts_again_is_scored_again_by_group_reward_fn(tmp_path):
    """Group 1 was done and scored while group 0 was played, and is too old in the next step."""
    options = {**PARTIAL, "max_staleness": 0}
    collector = make_collector(tmp_path, [1] * 4, {0: 0.3, 2: 0.3}, 1, **options)
    scored = []

    async def score_group(records):
        scored.append(records[0]["row"]["answer"])
        return [{"group": 0.25}] * len(records)

    env = collector.player.envs[""]
    env.spec = replace(env.spec, group_reward_fn=score_group)  # only whether there is one
    env.score_group = score_group
    assert {t.rewards["group"] for t in collector.collect(1)} == {0.25}
    assert collector.carried_over[0].is_scored
    collector.player.engine.version = 1
    second = collector.collect(2)
    assert rows_of(second) == ([1], []) and {t.rewards["group"] for t in second} == {0.25}
    assert scored.count("1") == 2 and scored.count("0") == 1
