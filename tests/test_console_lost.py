"""Runs whose stdout or terminal goes away: they train to the end, and metrics.jsonl is whole."""

import os
import subprocess
import sys

import pytest
from common import letter_run, make_environment, make_model, read_metrics

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


@pytest.fixture
def command(tmp_path):
    keys = letter_run(tmp_path, make_model(tmp_path / "tiny"))
    (tmp_path / "env.py").write_text(NOISY_ENV)
    keys += [
        "data.responses_per_prompt=2",
        "trainer.max_steps=1",
        f"trainer.save_dir={tmp_path}/run",
    ]
    return ["-m", "rl2.trainer.ppo", *keys]


def check_is_whole(process, folder):
    assert process.wait(timeout=200) == 0
    lines = read_metrics(folder / "run")
    assert [line["step"] for line in lines] == [1]
    assert all(line["rollout/failed"] == 0 for line in lines)
    assert (folder / "run/model/model.safetensors").exists()


def test_a_run_goes_on_without_a_reader(command, tmp_path):
    """As with `2>&1 | head -1`."""
    words = [sys.executable, *command, "rollout.env_isolation=process"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(words, env=make_environment(), **pipes)
    process.stdout.readline()
    process.stdout.close()
    check_is_whole(process, tmp_path)


def test_a_run_goes_on_without_its_terminal(command, tmp_path):
    """stderr is a file."""
    master, slave = os.openpty()
    stderr = tmp_path / "stderr"
    with open(stderr, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *command], env=make_environment(), stdout=slave, stderr=file
        )
    os.close(slave)
    os.read(master, 1)
    os.close(master)
    check_is_whole(process, tmp_path)
    assert "Traceback" not in stderr.read_text()
