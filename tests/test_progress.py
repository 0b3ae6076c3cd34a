"""Tests of rl2/progress.py: what is shown of work that takes long."""

import io
import re
import sys
import time

import pytest

from rl2 import progress
from rl2.progress import Bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("kind", "is_shown", "num_lines"),
    [(io.StringIO, True, 1), (Terminal, True, 0), (io.StringIO, False, 0)],
)
def test_rank_0_without_a_terminal_writes_lines(kind, is_shown, num_lines, monkeypatch):
    stderr = kind()
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", stderr)
    with Bar("rollout", 8, "groups", is_shown) as bar:
        bar.add(1, num_tokens=5)
        time.sleep(0.1)
        bar.add(2, num_tokens=10)
        bar.add(1, num_tokens=5)
    text = stderr.getvalue()
    assert text.count("3 of 8") == num_lines
    if not stderr.isatty():
        line = re.fullmatch(r"(?:rollout: 3 of 8 groups, 0 s, (\d+) tokens/s\n)?", text)
        assert line and (not line[1] or 5 < int(line[1]) <= 150), text  # 15 tokens in 0.1 s


def test_a_terminal_shows_how_far_a_phase_is_and_then_no_bar(monkeypatch):
    monkeypatch.setattr(progress, "BAR_DELAY", 0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress.enter("update")
    assert list(progress.track([1, 2])) == [1, 2]
    output = sys.stderr.getvalue()
    assert re.search(r"\rupdate: .*/2 .*micro-batches", output) and output.endswith(" \r")
