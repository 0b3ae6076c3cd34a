"""Tests in which order a step ends."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from rl2.trainer.recorder import Recorder


@pytest.mark.parametrize("test_freq, num_questions", [(None, 1), (2, 2)])
def test_no_rank_waits_while_the_first_writes_transcripts(test_freq, num_questions):
    """All ranks ask whether to stop before the first one writes, and again after an evaluation."""
    calls = []

    def is_requested_anywhere():
        calls.append("ask")
        return False

    def write_records(split, step, records):
        calls.append((split, step, *records))

    trainer = SimpleNamespace(save_freq=None, test_freq=test_freq)
    folder = SimpleNamespace(write_records=write_records)
    device = torch.device("cpu")
    recorder = Recorder(folder, None, {}, None, num_steps=9, device=device, prediction=None)
    recorder.config = SimpleNamespace(trainer=trainer)
    recorder.evaluate = lambda step: {"reward/mean": 0.5}
    recorder.phase = lambda name: nullcontext()
    recorder.stop_signal = SimpleNamespace(is_requested_anywhere=is_requested_anywhere)
    recorder.metrics_log = SimpleNamespace(
        write=lambda step, metrics: calls.append(metrics),
        health=SimpleNamespace(is_diverging=False),
    )
    is_last = recorder.finish_step(2, {"loss": 1.0}, iter(["a transcript"]))
    assert not is_last
    metrics = {"loss": 1.0} | ({"test/reward/mean": 0.5} if test_freq else {})
    assert calls == [*["ask"] * num_questions, ("train", 2, "a transcript"), metrics]
