"""Tests of rl2/progress.py: what is shown of work that takes long."""

import io
import re
import sys
import time

import pytest

from rl2 import progress
from rl2.progress import Bar


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05, raising=False)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_lines_say_what_is_done(capsys):
    with Bar("rollout", 8, "groups") as bar:
        bar.add(1, num_tokens=5)
        time.sleep(0.1)
        bar.add(2, num_tokens=10)
        bar.add(1, num_tokens=5)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rollout: 3 of 8 groups, 0 s, ") and line.endswith(" tokens/s")


@pytest.mark.parametrize("is_shown", [True, False])
def test_no_lines_on_a_terminal_or_of_other_ranks(is_shown, capsys, monkeypatch):
    if is_shown:
        monkeypatch.setattr(sys, "stderr", Terminal())
    with Bar("rollout", 8, "groups", is_shown) as bar:
        time.sleep(0.1)
        bar.add(3)
    assert capsys.readouterr().err == ""
    if is_shown:
        assert "3 of 8" not in sys.stderr.getvalue()


def test_a_terminal_shows_how_far_a_phase_is_and_then_no_bar(monkeypatch):
    monkeypatch.setattr(progress, "BAR_DELAY", 0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress.enter("update")
    assert list(progress.track([1, 2])) == [1, 2]
    output = sys.stderr.getvalue()
    assert re.search(r"\rupdate: .*/2 .*micro-batches", output) and output.endswith(" \r")
