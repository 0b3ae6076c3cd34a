"""Where metrics go: the file, the console and the services."""

import json
from pathlib import Path

from rl2.report import loggers
from rl2.report.loggers import Console, JsonLines, MetricsLog, RunName


def test_metrics_that_json_cannot_hold_become_null(tmp_path):
    file = JsonLines(tmp_path)
    file.log(1, {"step": 1, "reward/mean": float("nan"), "tokens/sampled": 7})
    file.log(2, {"step": 2, "reward/mean": 0.5})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 1, "reward/mean": None, "tokens/sampled": 7}
    assert lines[1] == {"step": 2, "reward/mean": 0.5}


def test_a_service_is_started_unless_it_is_disabled_or_cannot_be_used(monkeypatch):
    class Service:
        def __init__(self, run):
            self.run = run

    table = {"works": Service, "cannot": lambda run: None, "disabled": Service}
    monkeypatch.setattr(loggers, "LOGGERS", table)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    run = RunName(Path("runs/x"), "project", "x")
    log = MetricsLog(run, start_step=0, num_steps=5, disabled={"disabled"})
    file, service, console = log.loggers
    assert isinstance(file, JsonLines) and isinstance(console, Console)
    assert service.run is run


def test_the_console_shows_the_metrics_that_are_there_and_the_time_left(capsys):
    console = Console(start=2, num_steps=5)
    console.log(3, {"step": 3, "reward/mean": 0.25, "time/rollout": 1.5, "time/step": 2.0})
    console.close()
    line = capsys.readouterr().out.strip()
    assert line == "step 3/5  reward 0.250  2.0s (rollout 1.5)  0:00:04 left"
