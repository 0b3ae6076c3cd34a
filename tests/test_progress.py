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
    printed = ""
    with Bar("rollout", 8, "groups") as bar:
        for count in (0, 3):
            bar.add(count, num_tokens=5 * count)
            deadline = time.monotonic() + 5
            while f"{count} of 8 groups" not in printed and time.monotonic() < deadline:
                time.sleep(0.01)
                printed += capsys.readouterr().err
    assert "0 of 8 groups" in printed and "3 of 8 groups" in printed and "tokens/s" in printed
    assert all(line.startswith("rollout: ") for line in printed.splitlines())
    time.sleep(0.2)
    assert capsys.readouterr().err == ""  # it has ended


@pytest.mark.parametrize("is_shown", [True, False])
def test_no_lines_on_a_terminal_or_of_other_ranks(is_shown, capsys, monkeypatch):
    if is_shown:
        monkeypatch.setattr(sys, "stderr", Terminal())
    with Bar("rollout", 8, "groups", is_shown) as bar:
        bar.add(3)
        time.sleep(0.2)
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
