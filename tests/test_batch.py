"""Tests of batches, packs and plans of micro-batches against their definitions."""

import pickle
import random
from itertools import chain, count
from unittest import mock

import pytest
import torch
from common import make_samples

from rl2 import packing
from rl2.batch import Sample, collate, drop_zero_advantages, scored_spans, split_minibatches
from rl2.config.schema import CriticConfig, PPOConfig
from rl2.model.token_model import TokenScores
from rl2.packing import pack, plan_micro_batches, unpack, zigzag
from rl2.trainer.ppo import actor_loss, add_advantages, mini_batches


def make_ragged_batch(seed, **sizes):
    """Of some rows of a group the first tokens of the answer are not trained, of some none.

    The first row has no candidates.
    """
    rng = random.Random(seed)
    samples = make_samples(seed, **sizes)
    for sample in samples[1:]:
        for is_trained in sample.mask:
            ids = rng.sample(range(90), rng.randint(1, 5)) if is_trained else []
            sample.candidate_counts.append(len(ids))
            sample.candidate_ids.extend(ids)
    batch = collate(samples)
    for row, (prompt, end) in enumerate(scored_spans(batch)):
        if rng.random() < 0.15:
            batch.mask[row, : rng.randint(prompt, end)] = 0
    return batch


def make_sample(prompt_length, answer_length, group=0, trajectory=0):
    """A sample with prompt tokens 1 and answer tokens 2. It trains the answer."""
    tokens = [1] * prompt_length + [2] * answer_length
    mask = [0] * prompt_length + [1] * answer_length
    zeros = [0.0] * len(tokens)
    return Sample(tokens, mask, zeros, zeros, group, trajectory)


def test_a_sample_has_thirteen_bytes_a_token():
    """As it is kept, and as it travels to the other processes: lists had 95."""
    sample = Sample(range(9000), [1] * 9000, [-0.1] * 9000, [0.0] * 9000, 0, 0)
    columns = (sample.tokens, sample.mask, sample.logps, sample.rewards)
    assert sum(column.itemsize for column in columns) == 13
    assert len(pickle.dumps(sample)) < 13.1 * 9000


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_every_scored_pair_is_packed_once_after_its_own_context_and_unpacked(seed, share):
    batch = make_ragged_batch(seed)
    packed = pack(batch, share)
    tokens = packed.tokens[0].tolist()
    positions = packed.positions[0].tolist()
    starts = packed.cu_seqlens
    assert starts[0] == 0 and starts[-1] == len(tokens)
    pairs = torch.stack([packed.rows, packed.columns], 1).tolist()
    assert sorted(pairs) == batch.mask.nonzero().tolist()
    hidden_index = packed.hidden_index.tolist()
    targets = packed.targets.tolist()
    for index, target, (row, column) in zip(hidden_index, targets, pairs, strict=True):
        # The context of a hidden state: the prefix of its segment, if any, and its segment so far.
        segment = max(s for s in range(len(starts) - 1) if starts[s] <= index)
        context = tokens[starts[segment] : index + 1]
        for first, end, prefix in packed.prefixes:
            if first <= segment < end:
                context = tokens[starts[prefix] : starts[prefix + 1]] + context
        assert context == batch.inputs[row, : column + 1].tolist()
        assert positions[index] == column and target == batch.targets[row, column]
    if share:
        assert len(tokens) < pack(batch, False).tokens.shape[1]
    column = torch.randn(batch.mask.shape) * batch.mask
    scores = column[packed.rows, packed.columns].requires_grad_()
    unpacked = unpack(packed, scores, batch.mask.shape)
    assert torch.equal(unpacked, column)
    unpacked.sum().backward()
    assert torch.equal(scores.grad, torch.ones_like(scores))


def test_a_row_that_shares_no_prompt_is_one_segment():
    """The rows of a batch of SFT are all such rows: the sharing of prompts costs them nothing."""
    lengths = [(3, 4, 0), (3, 4, 1), (2, 5, 2), (2, 3, 2), (4, 2, 3)]
    samples = [make_sample(*lengths[i], trajectory=i) for i in range(5)]
    packed = pack(collate(samples))
    assert packed.cu_seqlens == [0, 6, 12, 14, 18, 20, 25]
    assert packed.prefixes == [(3, 5, 2)]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_zigzag_assigns_every_token_and_every_pair_with_its_candidates_once(seed, size, share):
    """Also after rows are selected, and where a mask has holes; the last row has no candidates."""
    batch = make_ragged_batch(seed).select([*range(1, 12), 0])
    batch.mask[1, ::2] = 0
    packed = pack(batch, share)
    parts = [zigzag(packed, size, rank) for rank in range(size)]
    assert sum(part.tokens.shape[1] for part in parts) == packed.tokens.shape[1]
    ends = batch.candidates.counts.cumsum(1)
    pairs = []
    for rank, part in enumerate(parts):
        assert part.tokens.shape[1] == sum(map(sum, part.chunks[rank]))
        # The input token, the position and the target of each pair are those of the batch.
        assert torch.equal(part.tokens[0, part.hidden_index], batch.inputs[part.rows, part.columns])
        assert torch.equal(part.positions[0, part.hidden_index], part.columns)
        assert torch.equal(part.targets, batch.targets[part.rows, part.columns])
        candidates = part.candidate_ids.split(part.candidate_counts.tolist())
        for row, column, ids in zip(part.rows, part.columns, candidates, strict=True):
            end = ends[row, column]
            start = end - batch.candidates.counts[row, column]
            assert ids.tolist() == batch.candidates.ids[row][start:end].tolist()
            assert (len(ids) == 0) == (row == 11)
        pairs += torch.stack([part.rows, part.columns], 1).tolist()
    assert sorted(pairs) == batch.mask.nonzero().tolist()


def test_zigzag_follows_its_definition_and_balances_causal_attention():
    """If 2 * size divides a segment, rank r has the chunks r and 2 * size - 1 - r.

    The attention cost is balanced to 1% for random lengths.
    """
    for size in (2, 4, 8):
        rng = random.Random(size)
        work = [0] * size
        for _ in range(20):
            packed = pack(collate([make_sample(rng.randint(200, 16000), 1)]), False)
            for rank in range(size):
                part = zigzag(packed, size, rank)
                work[rank] += (part.positions + 1).sum().item()
        assert max(work) <= 1.01 * sum(work) / size
        n = 6 * size
        packed = pack(collate([make_sample(n, 1)]), False)
        chunks = torch.arange(n).chunk(2 * size)
        for rank in range(size):
            part = zigzag(packed, size, rank)
            expected = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
            assert torch.equal(part.positions[0], expected)


def place_by_definition(units, num_bins, budget):
    """What `_place_units` promises: each unit in the first bin of least cost with room for it."""
    bins = [packing.Bin() for _ in range(num_bins)]
    for unit in units:
        with_room = [bin_ for bin_ in bins if bin_.tokens + unit.tokens <= budget]
        if not with_room:
            return None
        cheapest = min(with_room, key=lambda bin_: bin_.cost)
        cheapest.cost += unit.cost
        cheapest.tokens += unit.tokens
        cheapest.rows += unit.rows
    return sorted(bins, key=lambda bin_: -bin_.cost)


def fill_by_definition(units, num_ranks, budget, kind):
    """What `_fill_bins` promises: one more micro-batch is tried until all units have room."""
    units = sorted(units, key=lambda unit: (-unit.cost, unit.rows))
    tries = (place_by_definition(units, n * num_ranks, budget) for n in count(1))
    return next(bins for bins in tries if bins is not None)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("share, repeats", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_plan_has_each_row_once_in_the_fewest_micro_batches_where_the_definition_places_it(
    num_ranks, share, repeats, together, monkeypatch
):
    """Groups that stay together follow each other, also those whose prompts differ.

    Recurrent layers see whole rows, whose prompts are repeated: they stay within the budget.
    """
    for seed in range(15):
        rng = random.Random(seed)
        sizes = {"num_groups": rng.choice([3, 12]), "longest": rng.choice([20, 60])}
        batch = make_ragged_batch(seed, **sizes)
        if together:
            batch = collate(make_samples(seed, **sizes))
            batch.tokens[::7, 0] = 99
        ends = [end for _, end in scored_spans(batch)]
        largest = max(ends) * (3 if together else 1)
        budget = int(largest * rng.choice([1, 1.5, 3]))
        arguments = (batch, budget, num_ranks, share, rng.choice([0.0, 1e-2]), together, repeats)
        plans = plan_micro_batches(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(packing, "_fill_bins", fill_by_definition)
            assert plan_micro_batches(*arguments) == plans
        assert all(len(micro) == num_ranks for micro in plans)
        parts = list(chain(*plans))
        assert sorted(chain(*parts)) == batch.mask.any(1).nonzero().squeeze(1).tolist()
        for part in parts:
            assert pack(batch.select(part), share).tokens.shape[1] <= budget
            assert not repeats or sum(ends[row] for row in part) <= budget
            groups = [part[i : i + 3] for i in range(0, len(part), 3)]
            assert not together or all(rows == [*range(rows[0], rows[0] + 3)] for rows in groups)


def test_8192_sequences_are_planned_in_a_moment(monkeypatch):
    """Two of them have no room in one bin, so half of all numbers of micro-batches are too few."""
    place_units = mock.Mock(wraps=packing._place_units)
    monkeypatch.setattr(packing, "_place_units", place_units)
    batch = collate([make_sample(4 + i // 16 % 5, 30, i // 16, i) for i in range(8192)])
    assert len(plan_micro_batches(batch, 61, 8, True, 1e-5)) == 8192 // 8
    assert place_units.call_count <= 4, "one call for each way to cut the groups"


def test_a_sequence_or_group_over_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"12 tokens.*max_length_per_device x sp_size = 10"):
        plan_micro_batches(collate([make_sample(12, 1)]), 10, 1)
    batch = collate([make_sample(2, 9, 0, i) for i in range(2)])
    assert plan_micro_batches(batch, 10, 1)
    with pytest.raises(ValueError, match="a group of 20 tokens exceeds .* x sp_size = 17"):
        plan_micro_batches(batch, 17, 1, keep_groups_together=True)


def test_functions_of_the_user_get_columns_of_float32(tmp_path):
    """Sums and products of an int8 mask could wrap."""
    (tmp_path / "mine.py").write_text(
        "def estimator(x): return x.rewards - (x.mask * 1000).mean()\n"
        "def loss(x): return x.logps * x.mask.mean(), {'mask': x.mask * 1000}\n"
    )
    config = PPOConfig()
    config.adv.estimator = f"{tmp_path}/mine.py:estimator"
    config.actor.loss = f"{tmp_path}/mine.py:loss"
    batch = collate([make_sample(1, 3)])
    add_advantages(batch, config, {})
    assert batch.advantages.tolist() == [[-1000.0] * 3]
    batch.token_weights = torch.ones(1, 3)
    scores = TokenScores(logps=torch.ones(1, 3))
    _, metrics = actor_loss(config.actor, config.kl, batch, scores)
    assert metrics["mask"] == 3000


@pytest.mark.parametrize("count", [1, 2, 12, 40])
def test_minibatches_keep_trajectories_whole_and_none_is_empty(count):
    samples = make_samples(num_groups=5, group_size=5)
    for i, sample in enumerate(samples):
        sample.trajectory = i // 2  # two sequences a trajectory
    parts = list(split_minibatches(collate(samples), count, seed=3))
    assert len(parts) == min(count, 13)
    trajectories = [set(part.trajectory.tolist()) for part in parts]
    sizes = [len(part) for part in trajectories]
    assert all(trajectories) and sum(sizes) == 13 and len(set.union(*trajectories)) == 13
    assert sum(len(part.inputs) for part in parts) == 25
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [1, 4])
def test_every_pass_over_a_rollout_has_all_trajectories_in_new_mini_batches(count):
    batch = collate(make_samples(num_groups=4, group_size=4))
    section = CriticConfig(update_per_rollout=count, epochs_per_rollout=3, freeze_steps=1)
    assert not list(mini_batches(batch, section, step=1))
    parts = [part.trajectory.tolist() for part in mini_batches(batch, section, step=2)]
    again = [part.trajectory.tolist() for part in mini_batches(batch, section, step=2)]
    assert len(parts) == 3 * count and parts == again
    passes = [parts[first : first + count] for first in range(0, 3 * count, count)]
    for mini_batches_of_pass in passes:
        assert sorted(chain(*mini_batches_of_pass)) == batch.trajectory.tolist()
    assert count == 1 or len({str(mini_batches_of_pass) for mini_batches_of_pass in passes}) == 3
    [first] = split_minibatches(batch, 1, seed=2)
    assert torch.equal(first.trajectory, batch.trajectory)


def test_rows_that_are_dropped_from_a_mini_batch_stay_in_the_rollout():
    """The next pass over it needs them."""
    batch = collate([make_sample(1, 3, i, i) for i in range(2)])
    batch.advantages = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    [part] = split_minibatches(batch, 1, seed=0)
    part.token_weights = part.mask / 6
    weights = part.token_weights
    drop_zero_advantages(part)
    assert part.mask.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert part.token_weights.sum(1).tolist() == pytest.approx([0, 0.5])
    assert batch.mask.tolist() == [[1, 1, 1]] * 2 and weights.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # The rewards 1 and 0 of a group are advantages of 0.5 and -0.5; coef is 2.
        ("reinforce", [0.5 + 2 * 0.1, 0.5 - 2 * 0.3, -0.5, -0.5 + 2 * 0.5]),
        ("distillation", [0.1, -0.3, 0.0, 0.5]),
    ],
)
def test_a_teacher_adds_its_log_probability_minus_that_of_the_policy(estimator, expected):
    config = PPOConfig()
    config.adv.estimator = estimator
    config.teacher.model_name, config.teacher.coef = "teacher", 2.0
    batch = collate([make_sample(1, 2, 0, 0), make_sample(1, 2, 0, 1)])
    batch.rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    batch.old_logps = torch.tensor([[-1.0, -2.0], [-3.0, -1.5]])
    batch.teacher_logps = torch.tensor([[-0.9, -2.3], [-3.0, -1.0]])
    metrics = add_advantages(batch, config, {})
    assert batch.advantages.flatten().tolist() == pytest.approx(expected)
    assert metrics["actor/teacher_kl"] == pytest.approx(-(0.1 - 0.3 + 0.0 + 0.5) / 4)


def test_groups_are_split_only_if_that_is_faster():
    """Three groups on two ranks: to split one means that its prompt runs twice.

    That is faster if the prompt is short, since a rank with one group of three would be idle.
    """

    def plan(prompt_length, answer_length):
        samples = [make_sample(prompt_length, answer_length, i // 4, i) for i in range(12)]
        return plan_micro_batches(collate(samples), 10**6, 2)

    (micro,) = plan(prompt_length=10, answer_length=100)
    assert sorted(map(len, micro)) == [6, 6]
    (micro,) = plan(prompt_length=4000, answer_length=10)
    assert sorted(map(len, micro)) == [4, 8]


def test_attention_counts_in_the_balance_of_the_ranks():
    """A sequence of n tokens costs n + n^2 / 10: one of 100 more than all the others.

    The costliest rows come first.
    """
    batch = collate([make_sample(1, n, i, i) for i, n in enumerate([100, 60, 60, 10])])
    assert plan_micro_batches(batch, 1000, 2) == [[[1, 2], [0, 3]]]
    assert plan_micro_batches(batch, 1000, 2, attention_cost=0.1) == [[[0], [1, 2, 3]]]
