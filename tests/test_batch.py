"""Columns, plans and packs, against their definitions on random ragged data."""

import random

import pytest
import torch

from rl2.batch import Sample, collate, scored_spans, split_minibatches
from rl2.packing import pack, plan_micro_batches, unpack, zigzag


def make_samples(rng, num_groups=4, group_size=3, longest=20):
    """Groups with a common prompt; some trajectories train tokens in the middle only, some nothing
    at all."""
    samples = []
    for group in range(num_groups):
        prompt = [rng.randrange(1, 90) for _ in range(rng.randint(1, longest))]
        for _ in range(group_size):
            answer = [rng.randrange(1, 90) for _ in range(rng.randint(1, longest))]
            mask = [rng.random() < 0.7 for _ in answer]
            mask[0] = True
            tokens = prompt + answer
            mask = [0] * len(prompt) + [int(m and rng.random() < 0.95) for m in mask]
            logps = [-rng.random() if m else 0.0 for m in mask]
            samples.append(
                Sample(tokens, mask, logps, [float(m) for m in mask], group, len(samples))
            )
    return samples


def test_columns_sit_beside_the_predicted_token():
    batch = collate(
        [
            Sample([5, 6, 7, 2], [0, 0, 1, 1], [0, 0, -0.5, -0.25], [0, 0, 0, 1.0], 3, 8),
            Sample([9], [0], [0], [0], 3, 9),
        ]
    )
    assert batch.inputs.tolist() == [[5, 6, 7], [0, 0, 0]]
    assert batch.targets.tolist() == [[6, 7, 2], [0, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch.engine_logps.tolist() == [[0, -0.5, -0.25], [0, 0, 0]]
    assert batch.rewards.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert scored_spans(batch) == [(2, 3), (0, 0)]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_every_scored_pair_is_packed_once_with_its_own_history(seed, share):
    batch = collate(make_samples(random.Random(seed)))
    packed = pack(batch, share)
    tokens, positions = packed.tokens[0].tolist(), packed.positions[0].tolist()
    starts = packed.cu_seqlens
    assert starts[0] == 0 and starts[-1] == len(tokens)
    pairs = torch.stack([packed.rows, packed.columns], 1)
    assert sorted(pairs.tolist()) == batch.mask.nonzero().tolist()
    for at, target, row, column in zip(
        *(x.tolist() for x in (packed.hidden_index, packed.targets, packed.rows, packed.columns)),
        strict=True,
    ):
        # What the hidden state has seen: its segment up to itself, behind the prefix its segment
        # may have.
        segment = max(s for s in range(len(starts) - 1) if starts[s] <= at)
        seen = tokens[starts[segment] : at + 1]
        for a, b, c in packed.prefixes:
            if a <= segment < b:
                seen = tokens[starts[c] : starts[c + 1]] + seen
        assert seen == batch.inputs[row, : column + 1].tolist()
        assert positions[at] == column and target == batch.targets[row, column]
    if share:
        assert len(tokens) < pack(batch, False).tokens.shape[1]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_unpack_inverts_pack(seed, share):
    batch = collate(make_samples(random.Random(seed)))
    packed = pack(batch, share)
    column = torch.randn(batch.mask.shape) * batch.mask
    scores = column[packed.rows, packed.columns].requires_grad_()
    back = unpack(packed, scores, batch.mask.shape)
    assert torch.equal(back, column)
    back.sum().backward()
    assert torch.equal(scores.grad, torch.ones_like(scores))


def test_worked_example_of_a_shared_prompt():
    one = Sample([1, 2, 3, 4], [0, 0, 1, 1], [0] * 4, [0] * 4, 0, 0)
    two = Sample([1, 2, 5], [0, 0, 1], [0] * 3, [0] * 3, 0, 1)
    packed = pack(collate([one, two]))
    assert packed.tokens.tolist() == [[1, 2, 3]] and packed.cu_seqlens == [0, 2, 3]
    assert packed.prefixes == [(1, 2, 0)]
    assert list(zip(packed.hidden_index.tolist(), packed.targets.tolist(), strict=True)) == [
        (1, 3),
        (2, 4),
        (1, 5),
    ]


def test_a_rank_without_rows_gets_a_pack_that_scores_nothing():
    batch = collate(make_samples(random.Random(0)))
    packed = pack(batch.select([]))
    assert packed.tokens.shape == (1, 1) and len(packed.hidden_index) == 0
    assert unpack(packed, torch.zeros(0), (0, 5)).shape == (0, 5)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_zigzag_deals_out_every_token_and_every_pair_once(seed, size, share):
    batch = collate(make_samples(random.Random(seed)))
    packed = pack(batch, share)
    parts = [zigzag(packed, size, rank) for rank in range(size)]
    assert sum(part.tokens.shape[1] for part in parts) == packed.tokens.shape[1]
    pairs = []
    for rank, part in enumerate(parts):
        assert part.tokens.shape[1] == sum(map(sum, part.chunks[rank]))
        # The token that a pair's hidden state reads, and where it stands, are the batch's own.
        assert torch.equal(part.tokens[0, part.hidden_index], batch.inputs[part.rows, part.columns])
        assert torch.equal(part.positions[0, part.hidden_index], part.columns)
        assert torch.equal(part.targets, batch.targets[part.rows, part.columns])
        pairs += torch.stack([part.rows, part.columns], 1).tolist()
    assert sorted(pairs) == batch.mask.nonzero().tolist()


def test_zigzag_is_its_definition_and_shares_the_causal_work():
    """Where 2 * size divides a segment, rank r holds chunks r and 2 * size - 1 - r; any length is
    balanced to 1%."""
    for size in (2, 4, 8):
        rng = random.Random(size)
        work = [0] * size
        for _ in range(20):
            n = rng.randint(200, 16000)
            sample = Sample([1] * (n + 1), [0] * n + [1], [0.0] * (n + 1), [0.0] * (n + 1), 0, 0)
            for rank in range(size):
                part = zigzag(pack(collate([sample]), False), size, rank)
                work[rank] += (part.positions + 1).sum().item()
        assert max(work) <= 1.01 * sum(work) / size
        n = 6 * size
        sample = Sample([1] * (n + 1), [0] * n + [1], [0.0] * (n + 1), [0.0] * (n + 1), 0, 0)
        for rank in range(size):
            part = zigzag(pack(collate([sample]), False), size, rank)
            chunks = torch.arange(n).chunk(2 * size)
            assert torch.equal(
                part.positions[0], torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
            )


def test_a_rank_whose_zigzag_holds_nothing_runs_one_token_and_scores_nothing():
    packed = pack(collate([Sample([5, 6], [0, 1], [0.0, 0.0], [0.0, 0.0], 0, 0)]))
    parts = [zigzag(packed, 4, rank) for rank in range(4)]
    assert [len(part.hidden_index) for part in parts].count(1) == 1
    assert all(part.tokens.shape == (1, 1) for part in parts)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_plan_runs_every_row_once_within_the_budget(seed, num_ranks, share):
    samples = make_samples(random.Random(seed), num_groups=6)
    samples.append(Sample([4], [0], [0.0], [0.0], 6, len(samples)))
    batch = collate(samples)
    budget = 60
    plans = plan_micro_batches(batch, budget, num_ranks, share)
    assert all(len(micro) == num_ranks for micro in plans)
    rows = sorted(row for micro in plans for part in micro for row in part)
    assert rows == batch.mask.any(1).nonzero().squeeze(1).tolist()
    for micro in plans:
        for part in micro:
            assert pack(batch.select(part), share).tokens.shape[1] <= budget


@pytest.mark.parametrize("attention_cost", [0.0, 1e-4])
def test_plan_is_balanced_on_a_long_tailed_run(attention_cost):
    rng = random.Random(0)
    lengths = [min(16000, max(200, int(rng.lognormvariate(7.6, 0.9)))) for _ in range(512)]
    samples = [
        Sample([1] * (n + 1), [0] * n + [1], [0.0] * (n + 1), [0.0] * (n + 1), i, i)
        for i, n in enumerate(lengths)
    ]
    plans = plan_micro_batches(
        collate(samples), 32768, 8, share_prompts=False, attention_cost=attention_cost
    )
    cost = [n + attention_cost * n**2 for n in lengths]
    loads = [[sum(cost[row] for row in part) for part in micro] for micro in plans]
    slowest = sum(max(micro) for micro in loads)
    assert slowest <= 1.03 * sum(cost) / 8
    assert len(plans) <= -(-sum(lengths) // (8 * 32768)) + (attention_cost > 0)


def test_fewer_groups_than_ranks_are_cut_so_that_all_work():
    batch = collate(make_samples(random.Random(1), num_groups=1, group_size=8))
    (micro,) = plan_micro_batches(batch, 1000, 4)
    assert all(micro)


def test_a_sequence_over_the_budget_is_named():
    with pytest.raises(ValueError, match=r"12 tokens.*max_length_per_device x sp_size = 10"):
        plan_micro_batches(
            collate([Sample([1] * 13, [0] * 12 + [1], [0] * 13, [0] * 13, 0, 0)]), 10, 1
        )


@pytest.mark.parametrize("count", [1, 4, 12, 40])
def test_minibatches_keep_trajectories_whole_and_leave_none_empty(count):
    samples = make_samples(random.Random(0), num_groups=5, group_size=5)
    for i, sample in enumerate(samples):
        sample.trajectory = i // 2  # two sequences a trajectory
    parts = split_minibatches(collate(samples), count, seed=3)
    assert len(parts) == min(count, 13)
    sets = [set(part.trajectory.tolist()) for part in parts]
    assert all(sets) and sum(map(len, sets)) == 13 and len(set.union(*sets)) == 13
    assert sum(len(part.inputs) for part in parts) == 25
    assert max(map(len, sets)) - min(map(len, sets)) <= 1


def test_groups_are_cut_only_where_that_is_faster():
    """One group on two ranks is worth a second run of its short prompt, and not of its long one."""

    def parts(prompt, answer):
        tokens = [1] * prompt + [2] * answer
        zeros = [0.0] * len(tokens)
        samples = [
            Sample(tokens, [0] * prompt + [1] * answer, zeros, zeros, i // 4, i) for i in range(12)
        ]
        return plan_micro_batches(collate(samples), 10**6, 2)

    (micro,) = parts(
        prompt=10, answer=100
    )  # three groups: a 2 to 1 split would leave one rank idle for a third
    assert sorted(map(len, micro)) == [6, 6]
    (micro,) = parts(prompt=4000, answer=10)
    assert sorted(map(len, micro)) == [4, 8]


def test_cost_is_balanced_where_tokens_alone_would_not_be():
    """At quadratic=1/1000 a document of 1,000 tokens costs 2,000, as much as 18 of 100 tokens
    do."""
    lengths = [1000] * 2 + [100] * 20
    samples = [
        Sample([1] * (n + 1), [0] + [1] * n, [0.0] * (n + 1), [0.0] * (n + 1), i, i)
        for i, n in enumerate(lengths)
    ]
    cost = [n + n * n / 1000 for n in lengths]
    (micro,) = plan_micro_batches(collate(samples), 10**6, 3, False, 1 / 1000)
    loads = [sum(cost[row] for row in part) for part in micro]
    assert max(loads) <= 1.1 * sum(loads) / 3
    (by_tokens,) = plan_micro_batches(collate(samples), 10**6, 3, False)
    assert max(sum(cost[row] for row in part) for part in by_tokens) > 1.15 * sum(loads) / 3


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_whole_groups_are_one_behind_the_other_in_one_micro_batch(seed, num_ranks, share):
    """Pairs, of which some have different prompts, whose tokens then count twice."""
    rng = random.Random(seed)
    samples = make_samples(rng, num_groups=6, group_size=2)
    for sample in samples:
        sample.mask[-1] = 1
        if rng.random() < 0.2:
            sample.tokens[0] = 99
    batch = collate(samples)
    plans = plan_micro_batches(batch, 85, num_ranks, share, keep_groups_together=True)
    assert len(plans) > 1 or num_ranks > 2
    for part in (part for micro in plans for part in micro):
        assert part[::2] == [row - 1 for row in part[1::2]] and all(
            row % 2 == 0 for row in part[::2]
        )
        assert pack(batch.select(part), share).tokens.shape[1] <= 85
    assert sorted(row for micro in plans for part in micro for row in part) == list(range(12))
    with pytest.raises(
        ValueError, match="a group of .* tokens exceeds max_length_per_device x sp_size = 8"
    ):
        plan_micro_batches(batch, 8, num_ranks, share, keep_groups_together=True)
