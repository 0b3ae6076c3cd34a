"""Saved rollouts: their tokens, and training on them without an engine."""

import json
import textwrap

import pytest
import torch
from common import launch_runs, make_model, make_tokenizer, read_jsonl, read_metrics
from safetensors.torch import load_file
from test_trainer import LETTER_ENV

from rl2.batch import Sample
from rl2.rollout.saved import checksum, pack_tokens
from rl2.rollout.trajectory import Trajectory


def make_sample(tokens, trajectory):
    """The first token is the prompt, and the reward stands at the last one."""
    mask = [0] + [1] * (len(tokens) - 1)
    logps = [-0.5 * m for m in mask]
    rewards = [0.0] * (len(tokens) - 1) + [1.0]
    return Sample(tokens, mask, logps, rewards, group=0, trajectory=trajectory)


def test_tokens_of_a_step_are_packed_with_the_lengths_of_its_samples():
    trajectories = [Trajectory(4, 0, []), Trajectory(7, 0, []), Trajectory(9, 0, [])]
    trajectories[0].samples = [make_sample([5, 6, 7], 4), make_sample([8, 9], 4)]
    trajectories[2].samples = [make_sample([1, 2], 9)]
    tensors = pack_tokens(trajectories, 123)
    assert {name: (str(x.dtype), x.tolist()) for name, x in tensors.items()} == {
        "tokens": ("torch.int32", [5, 6, 7, 8, 9, 1, 2]),
        "mask": ("torch.int8", [0, 1, 1, 0, 1, 0, 1]),
        "logps": ("torch.float32", [0, -0.5, -0.5, 0, -0.5, 0, -0.5]),
        "rewards": ("torch.float32", [0, 0, 1, 0, 1, 0, 1]),
        "length": ("torch.int64", [3, 2, 2]),
        "trajectory": ("torch.int64", [4, 4, 9]),
        "meaning": ("torch.int64", 123),
    }
    assert pack_tokens([], 123)["tokens"].dtype == torch.int32  # every group was filtered out


def test_the_checksum_is_that_of_the_vocabulary_and_the_temperature():
    tokenizer = make_tokenizer()
    expected = checksum(tokenizer, 1.0)
    assert checksum(make_tokenizer(), 1.0) == expected != checksum(tokenizer, 0.7)
    tokenizer.add_tokens(["another"])
    assert checksum(tokenizer, 1.0) != expected
