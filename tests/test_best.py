"""The best evaluation: kept, and repeated to the bit after an interruption."""

import json
import math

import pytest
import torch.distributed as dist
from common import read_untimed_metrics

import rl2
from rl2.config.schema import SFTConfig
from rl2.recorder import Recorder
from rl2.run.best import Best, best_metric

pytestmark = pytest.mark.usefixtures("hears_ctrl_c", "runs_here")


def talk(text):
    return {"prompt": "say", "completion": text}


TRAINED = [talk("abc") for _ in range(24)]
KEYS = {
    "data.batch_size": 4,
    "actor.lr": 0.05,
    "actor.dtype": "float32",
    "trainer.test_freq": 1,
    "trainer.save_best": "auto",
    "trainer.keep_checkpoints": 1,
}


def train(model, name, **keys):
    # The test row begins as the trained ones: its loss falls at first, and then rises.
    return rl2.train(
        "sft",
        rows=TRAINED,
        test_rows=[talk("abd")],
        model_name=model,
        **KEYS | {"trainer.experiment_name": name} | keys,
    )


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


TWO_SETS = {"easy": "x.jsonl", "hard": "y.jsonl"}


@pytest.mark.parametrize("holds_out", [False, True])
@pytest.mark.parametrize(
    ("path", "chosen", "metric"),
    [
        ("x.jsonl", "auto", "test/loss"),
        ({"easy": "x.jsonl"}, "auto", "test/easy/loss"),
        (TWO_SETS, "auto", "test/*/loss"),
        (TWO_SETS, "hard", "test/hard/loss"),
        (TWO_SETS, "easy/perplexity", "test/easy/perplexity"),
    ],
)
def test_the_metric_of_each_choice(path, chosen, metric, holds_out):
    """Test sets of their own have the names that held out training rows have from their sources."""
    config = SFTConfig()
    if holds_out:
        config.data.path, config.data.test_ratio = path, 0.1
    else:
        config.data.test_path = path
    config.trainer.save_best = chosen
    assert best_metric(config) == metric


def test_judging():
    best = Best("test/loss")
    for step, value in enumerate([3.0, 2.0, 2.0, math.nan, 1.5], 1):
        best = best.judge(step, {"test/loss": value})
        if step == 4:
            assert best == Best("test/loss", 2, 2.0)
    assert best == Best("test/loss", 5, 1.5) and best == best.judge(5, {"test/loss": 1.5})
    best = Best("test/reward/mean").judge(1, {"test/reward/mean": 0.1})
    assert best.judge(2, {"test/reward/mean": 0.2}).step == 2
    with pytest.raises(ValueError, match="save_best=loss.*accuracy"):
        Best("test/loss").judge(0, {"test/accuracy": 1.0})
    best = Best("test/*/loss")  # the mean of several test sets
    for step, (easy, hard) in enumerate([(1.0, 3.0), (2.5, 1.0), (1.9, 1.9)], 1):
        best = best.judge(step, {"test/easy/loss": easy, "test/hard/loss": hard, "test/x/acc": 0})
    assert (best.step, best.value) == (2, 1.75)


def test_the_best_is_kept(model, monkeypatch, capsys):
    keys = {"trainer.save_freq": 1}
    whole = train(model, "whole", **keys)
    losses = {line["step"]: line["test/loss"] for line in whole.metrics if line["step"]}
    best = min(losses, key=losses.get)
    assert 1 <= best < 5 and max(losses) == 6, losses
    record = json.loads((whole.path / "run.json").read_text())
    assert record["best"] == {"step": best, "metric": "test/loss", "value": losses[best]}
    assert record["is_complete"]
    checkpoints = {path.name for path in (whole.path / "checkpoints").glob("step_*")}
    assert checkpoints >= {f"step_{best}", "step_6"}
    assert weights(whole.best_model_path) != weights(whole.model_path)
    assert f"best: test/loss {losses[best]:.4g} of step {best}" in capsys.readouterr().out
    short = train(model, "short", **{"trainer.max_steps": best})
    assert weights(short.model_path) == weights(whole.best_model_path)

    # Every checkpoint of a best step is there, and the model of it is not.
    def interrupt(recorder, step):
        raise InterruptedError("between checkpoint and export")

    for _ in range(best):
        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "_export_best", interrupt)
            with pytest.raises(InterruptedError):
                train(model, "broken", **keys)
        if dist.is_initialized():
            dist.destroy_process_group()
    for path in whole.path.parent.glob("broken/checkpoints/step_*/run.json"):
        record = json.loads(path.read_text())
        record["best"]["num_worse"] = 0  # as an earlier version wrote it
        path.write_text(json.dumps(record))
    broken = train(model, "broken", **keys)
    assert weights(broken.best_model_path) == weights(whole.best_model_path)
    assert (
        read_untimed_metrics(broken.path)
        == read_untimed_metrics(short.path)[: best + 1]
        + read_untimed_metrics(whole.path)[best + 1 :]
    )
