"""Saved rollouts: their tokens, and training on them without an engine."""

import json
import shutil
from math import exp

import numpy as np
import pytest
import torch
from common import (
    launch_runs,
    letter_run,
    make_model,
    make_tokenizer,
    read_jsonl,
    read_metrics,
    same_weights,
)
from safetensors.numpy import save_file
from safetensors.torch import load_file

from rl2.batch import Sample, collate
from rl2.config.schema import PPOConfig, dump
from rl2.model.token_model import TokenScores
from rl2.rollout.saved import COLUMNS, SavedRollouts, StartModel, hash_tokens, pack_tokens
from rl2.rollout.stats import add_token_columns, take_samples
from rl2.rollout.trajectory import FinishReason, Trajectory
from rl2.trainer.ppo import actor_loss


def make_sample(tokens, trajectory):
    """The first token is the prompt, and the reward stands at the last one."""
    mask = [0] + [1] * (len(tokens) - 1)
    logps = [-0.5 * m for m in mask]
    rewards = [0.0] * (len(tokens) - 1) + [1.0]
    return Sample(tokens, mask, logps, rewards, group=0, trajectory=trajectory)


def test_what_training_knows_of_a_token_is_kept_beside_it():
    trajectories = [
        Trajectory(7, 1, [], samples=[make_sample([5, 6, 7, 8], 7), make_sample([8, 9], 7)]),
        Trajectory(4, 0, [], samples=[make_sample([3, 2, 4], 4)]),
        Trajectory(9, 1, []),
    ]
    saved = pack_tokens(trajectories, 123)
    batch = collate(take_samples(trajectories))
    batch.advantages = batch.targets.float()
    batch.old_logps = batch.engine_logps  # another run's: they say nothing of the trainer
    add_token_columns(saved, batch)
    assert saved["advantages"].tolist() == (saved["tokens"] * saved["mask"]).tolist()
    assert saved["trajectory"].tolist() == [4, 7, 7] and "trainer_logps" not in saved
    batch.old_logps = 2 * batch.engine_logps
    add_token_columns(saved, batch)
    assert saved["trainer_logps"].tolist() == (2 * saved["logps"]).tolist()
    nothing = pack_tokens([], 123)
    add_token_columns(nothing, batch)
    assert "advantages" not in nothing


# Characters at which str.splitlines cuts, and which JSON does not escape.
LINE_SEPARATORS = "a\u2028b\u2029c\u0085d"


def write_run(folder, trajectories, tokens_hash):
    """A run folder with one step, which has these trajectories."""
    rollouts = folder / "rollouts/train"
    rollouts.mkdir(parents=True)
    config = PPOConfig()
    config.actor.model_name = "tiny"
    (folder / "config.yaml").write_text(dump(config))
    lines = [json.dumps(trajectory.record(), ensure_ascii=False) for trajectory in trajectories]
    (rollouts / "step_1.jsonl").write_text("".join(line + "\n" for line in lines))
    save_file(pack_tokens(trajectories, tokens_hash), rollouts / "step_1.safetensors")
    return str(folder)


def test_trajectories_come_back_as_they_were(tmp_path):
    trajectories = []
    for number, samples in enumerate([[[5, 6, 7], [4, 3]], [[8, 9]], []]):
        trajectory = Trajectory(
            id=number,
            group=number // 2,
            messages=[{"role": "user", "content": LINE_SEPARATORS}],
            row={"answer": LINE_SEPARATORS},
            rewards={"right": 1.0, "short": 0.5},
            finish_reason=FinishReason.STOP,
            num_turns=1,
            versions=[(0, 2)],
            # Trajectories that were filtered out have none.
            samples=[make_sample(tokens, number) for tokens in samples],
        )
        trajectories.append(trajectory)
    folder = write_run(tmp_path / "a", trajectories, 7)
    again = SavedRollouts(folder, StartModel("tiny"), 7).collect(1)
    for before, now in zip(trajectories, again, strict=True):
        assert [vars(sample) for sample in now.samples] == [vars(s) for s in before.samples]
        assert now.record() == before.record() | {"versions": [[0, 2]]}
    assert SavedRollouts(write_run(tmp_path / "b", [], 7), StartModel("tiny"), 7).collect(1) == []


@pytest.mark.parametrize(
    "name, damage, words",
    [
        ("config.yaml", lambda text: b"a: [", "config.yaml is damaged"),
        ("config.yaml", lambda text: b"", "config.yaml is damaged"),
        ("step_1.jsonl", lambda text: text[: len(text) // 2], "step_1.jsonl, or .* is damaged"),
        ("step_1.jsonl", lambda text: b"", "step_1.jsonl, or .* is damaged"),
        ("step_1.safetensors", lambda text: text[:20], "step_1.jsonl, or .* is damaged"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, damage, words):
    trajectory = Trajectory(0, 0, [], samples=[make_sample([5, 6, 7], 0)])
    folder = write_run(tmp_path, [trajectory], 7)
    [path] = tmp_path.rglob(name)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=words):
        SavedRollouts(folder, StartModel("tiny"), 7).collect(1)


def test_a_run_that_needs_experts_is_told_where_they_are_missing(tmp_path):
    trajectory = Trajectory(0, 0, [], samples=[make_sample([5, 6, 7], 0)])
    without = SavedRollouts(write_run(tmp_path / "a", [trajectory], 7), StartModel("tiny"), 7)
    assert without.collect(1)
    with pytest.raises(ValueError, match="routing_replay=true: .*step_1.jsonl was sampled without"):
        SavedRollouts(tmp_path / "a", StartModel("tiny"), 7, needs_experts=True).collect(1)
    trajectory.samples[0].experts = [np.ones((2, 3, 1), np.int16)]
    folder = write_run(tmp_path / "b", [trajectory], 7)
    with pytest.raises(ValueError, match="routing_replay=true: tiny .* not those of another"):
        SavedRollouts(folder, StartModel("another"), 7, needs_experts=True)
    [again] = SavedRollouts(folder, StartModel("tiny"), 7, needs_experts=True).collect(1)
    assert again.samples[0].experts[0].tolist() == trajectory.samples[0].experts[0].tolist()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of three steps that keeps its tokens, and runs on its rollouts, by their names."""
    folder = tmp_path_factory.mktemp("saved")
    keys = [
        *letter_run(folder, make_model(folder / "tiny")),
        "data.prompts_per_rollout=8",
        "data.responses_per_prompt=2",
        "trainer.n_epochs=1",
    ]
    saved = f"trainer.rollouts_from={folder / 'sampled'}"
    other_loss = [saved, "trainer.n_epochs=2", "actor.loss=cispo", "actor.update_per_rollout=2"]
    settings = {
        "sampled": ["trainer.save_tokens=true"],
        "whole": [*other_loss, "trainer.max_steps=4"],
        "cispo": [*other_loss, "trainer.save_tokens=true", "trainer.save_freq=2"],
    }
    commands = []
    for name, own in settings.items():
        commands.append(["ppo", *keys, *own, f"trainer.save_dir={folder / name}"])
    last = commands[-1]  # it resumes after two of its four steps
    launch_runs(1, [*commands[:-1], [*last, "trainer.max_steps=2"], [*last, "trainer.max_steps=4"]])
    return folder


def test_saved_tokens_are_those_of_the_transcripts(runs):
    records = read_jsonl(runs / "sampled/rollouts/train/step_2.jsonl")
    tensors = load_file(runs / "sampled/rollouts/train/step_2.safetensors")
    assert tensors["trajectory"].tolist() == [record["id"] for record in records]
    lengths = tensors["length"].tolist()
    tokenizer = make_tokenizer()
    columns = [tensors[name].split(lengths) for name in ("tokens", "mask", "logps", "rewards")]
    for record, tokens, mask, logps, rewards in zip(records, *columns, strict=True):
        assert mask.sum() == record["length"] and rewards.sum() == pytest.approx(record["reward"])
        reply = tokenizer.decode(tokens[mask == 1])
        assert reply.removesuffix("<|im_end|>") == record["messages"][-1]["content"]
        assert (logps[mask == 1] < 0).all() and (logps[mask == 0] == 0).all()
    assert not list((runs / "sampled").rglob("*.partial"))
    # One update a step: the trainer has not scored the rollout before it.
    assert tensors["advantages"].any() and "trainer_logps" not in tensors
    tensors = load_file(runs / "cispo/rollouts/train/step_1.safetensors")
    torch.testing.assert_close(tensors["trainer_logps"], tensors["logps"], rtol=0, atol=1e-4)


def test_other_steps_have_the_recorded_data_and_log_probabilities(runs):
    """After the third and last step comes the first one again. The run has resumed before both."""
    assert same_weights(runs / "whole/model", runs / "cispo/model")
    lines = read_metrics(runs / "cispo")
    sampled = read_metrics(runs / "sampled")
    for line, same in zip(lines, [*sampled, sampled[0]], strict=True):
        for name in ("reward/mean", "tokens/sampled"):
            assert line[name] == same[name]
    # By how much the old log-probabilities differ from those of the engine, which rollout.exact
    # makes equal on most CPUs. Later the old ones are the engine's.
    name = "actor/mismatch_logp_difference"
    assert [name in line for line in lines] == [True, False, False, False]
    assert 0 <= lines[0][name] < 1e-5
    assert all(abs(line["actor/ratio"] - 1) > 1e-3 for line in lines[1:])
    tokens = load_file(runs / "sampled/rollouts/train/step_1.safetensors")
    for step in (1, 4):
        repeated = load_file(runs / f"cispo/rollouts/train/step_{step}.safetensors")
        for name in (*COLUMNS, "length", "trajectory", "tokens_hash"):
            assert torch.equal(repeated[name], tokens[name])


@pytest.mark.parametrize("removed", ["step_1.safetensors", "step_2.safetensors", "*"])
def test_a_run_without_the_tokens_of_a_step_is_refused(runs, tmp_path, removed):
    copy = shutil.copytree(runs / "sampled", tmp_path / "copy")
    for file in (copy / "rollouts/train").glob(removed):
        file.unlink()
    with pytest.raises(ValueError, match="rollouts_from=.*has the tokens .*from its first"):
        SavedRollouts(str(copy), StartModel("tiny"), 0)


def test_another_vocabulary_or_temperature_is_refused(runs):
    model = StartModel(str(runs / "tiny"))
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["another"])
    for tokens_hash in (hash_tokens(make_tokenizer(), 0.7), hash_tokens(tokenizer, 1.0)):
        rollouts = SavedRollouts(str(runs / "sampled"), model, tokens_hash)
        with pytest.raises(ValueError, match="another tokenizer .* or .*temperature"):
            rollouts.collect(1)


def test_only_the_start_model_has_sampled_the_first_step(runs):
    model, tokens_hash = str(runs / "tiny"), hash_tokens(make_tokenizer(), 1.0)
    rollouts = SavedRollouts(str(runs / "sampled"), StartModel(model), tokens_hash)
    assert len(rollouts.collect(1)) == 16 and not rollouts.old_policy_is_sampler
    assert rollouts.collect(2) and rollouts.old_policy_is_sampler  # an update came before it
    assert rollouts.collect(4) and rollouts.old_policy_is_sampler  # step 1 again
    for other in (
        StartModel("another"),
        StartModel(model, adapter="adapter"),
        StartModel(model, quantize_base="nf4"),
    ):
        rollouts = SavedRollouts(str(runs / "sampled"), other, tokens_hash)
        assert rollouts.collect(1) and rollouts.old_policy_is_sampler


def test_the_kl_loss_of_tokens_of_another_policy_is_weighted_in_one_update_too():
    """Of what it was sampled with, such a rollout says nothing of the engine's rounding."""
    config = PPOConfig()
    config.kl.loss_estimator, config.kl.type = "k3", "loss"
    batch = collate([make_sample([5, 6, 7, 8], 0)])
    batch.old_logps, batch.ref_logps = batch.engine_logps, -1.5 * batch.mask
    batch.advantages = batch.token_weights = 1.0 * batch.mask
    scores = TokenScores(logps=-0.2 * batch.mask)
    losses = []
    for config.kl.coef in (0.0, 1.0):
        loss, metrics = actor_loss(
            config.actor, config.kl, batch, scores, old_policy_is_sampler=True
        )
        losses.append(loss.item())
    d = -0.2 + 1.5
    assert losses[1] - losses[0] == pytest.approx(3 * exp(-0.2 + 0.5) * (exp(-d) - 1 + d))
    assert not any("mismatch" in name for name in metrics)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 1.0), ("k2", 0.5), ("k3", exp(-1))])
def test_the_logged_kl_is_that_of_the_sampled_tokens_by_reward_estimator(estimator, expected):
    """With kl.type=loss, too, where another estimator is in the loss."""
    config = PPOConfig()
    config.kl.type, config.kl.coef, config.kl.reward_estimator = "loss", 0.1, estimator
    batch = collate([make_sample([5, 6, 7, 8], 0)])
    batch.old_logps, batch.ref_logps = -0.5 * batch.mask, -1.5 * batch.mask
    batch.advantages, batch.token_weights = 1.0 * batch.mask, batch.mask / batch.mask.sum()
    scores = TokenScores(logps=-0.2 * batch.mask)
    config.actor.update_per_rollout = 2  # the policy has moved
    _, metrics = actor_loss(config.actor, config.kl, batch, scores)
    assert metrics["kl"].item() == pytest.approx(expected)
