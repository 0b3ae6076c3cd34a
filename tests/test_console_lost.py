"""A run whose stdout and stderr go away: it trains to the end, and metrics.jsonl is whole."""

import os
import subprocess
import sys

from common import letter_run, make_environment, read_metrics

# Whatever a run prints by, in every call of the environment.
NOISY_ENV = """
import logging, subprocess, sys, warnings
from tqdm import tqdm

def reward_fn(messages, answer):
    print("noise")
    print("noise", file=sys.stderr)
    warnings.warn(f"noise {messages[-1]['content']}")
    logging.warning("noise")
    for _ in tqdm(range(2), mininterval=0):
        tqdm.write("noise")
    subprocess.run(["echo", "noise"], check=False)  # it may be the first to write in vain
    return len(messages[-1]["content"]) / 99
"""


def test_a_run_goes_on_without_its_terminal_and_the_reader_of_its_errors(model, tmp_path):
    """stdout is a terminal that is closed, and stderr a pipe as with `2>&1 | head -1`."""
    keys = letter_run(tmp_path, model)
    (tmp_path / "env.py").write_text(NOISY_ENV)
    keys += [
        "data.responses_per_prompt=2",
        "trainer.max_steps=1",
        f"trainer.save_dir={tmp_path}/run",
        "rollout.env_isolation=process",
    ]
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rl2.trainer.ppo", *keys],
        env=make_environment(),
        stdout=slave,
        stderr=subprocess.PIPE,
    )
    os.close(slave)
    os.read(master, 1)
    os.close(master)
    process.stderr.readline()
    process.stderr.close()
    assert process.wait(timeout=200) == 0
    [line] = read_metrics(tmp_path / "run")
    assert line["step"] == 1 and line["rollout/failed"] == 0
    assert (tmp_path / "run/model/model.safetensors").exists()
