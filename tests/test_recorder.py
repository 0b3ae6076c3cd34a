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
    folder = SimpleNamespace(write_records=write_records, prune=lambda proven_step: None)
    device = torch.device("cpu")
    parts = {"data": SimpleNamespace(is_exhausted=False)}
    recorder = Recorder(folder, None, {}, parts, num_steps=9, device=device, prediction=None)
    recorder.config = SimpleNamespace(trainer=trainer)
    recorder.evaluate = lambda step: {"reward/mean": 0.5}
    recorder.phase = lambda name: nullcontext()
    recorder.stop_signal = SimpleNamespace(is_requested_anywhere=is_requested_anywhere)
    recorder.metrics_log = SimpleNamespace(write=lambda step, metrics: calls.append(metrics))
    recorder.health = SimpleNamespace(is_diverging=False, proven_step=2)
    is_last = recorder.finish_step(2, {"loss": 1.0}, iter(["a transcript"]))
    assert not is_last
    metrics = {"loss": 1.0} | ({"test/reward/mean": 0.5} if test_freq else {})
    assert calls == [*["ask"] * num_questions, ("train", 2, "a transcript"), metrics]


def test_a_run_whose_data_are_exhausted_ends_with_a_test_a_checkpoint_and_no_further_step():
    calls = []
    data = SimpleNamespace(is_exhausted=False)
    recorder = Recorder(
        folder=SimpleNamespace(
            save=lambda step, parts, owes_test: calls.append(("save", step)),
            prune=lambda proven_step: None,
        ),
        tokenizer=None,
        workers={},
        parts={"data": data},
        num_steps=9,
        device=torch.device("cpu"),
        prediction=None,
    )
    trainer = SimpleNamespace(save_freq=5, test_freq=5)
    recorder.config = SimpleNamespace(trainer=trainer)
    recorder.evaluate = lambda step: calls.append(("test", step)) or {}
    recorder.phase = lambda name: nullcontext()
    recorder.stop_signal = SimpleNamespace(is_requested_anywhere=lambda: False)
    recorder.health = SimpleNamespace(is_diverging=False, proven_step=2)
    recorder.metrics_log = SimpleNamespace(write=lambda step, metrics: None)
    recorder._weights_are_finite = lambda: True
    recorder.start_step = recorder.last_step = 1
    steps = []
    for step in recorder.remaining_steps():
        steps.append(step)
        data.is_exhausted = step == 3
        assert not recorder.finish_step(step, {})
    assert steps == [2, 3] and calls == [("test", 3), ("save", 3)]
