"""`rl2.train`: the command line's numbers, and a process that goes on as before."""

import asyncio
import gc
import itertools
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import yaml
from common import LETTER_ENV, LETTER_ROWS, ROOT, launch, read_untimed_metrics, run, start_server
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

import rl2
from rl2.config.values import flatten, show_value
from rl2.engine.local import LocalEngine
from rl2.report import loggers
from rl2.run import signals
from rl2.run.signals import STOP_SIGNALS
from rl2.user_files import import_env_file

pytestmark = pytest.mark.usefixtures("hears_ctrl_c", "runs_here")

PAIRS = [{"prompt": f"say ä, {i}", "chosen": "abc", "rejected": "xyz"} for i in range(8)]
KEYS = {
    "data": {"prompts_per_rollout": 4, "responses_per_prompt": 8},
    "actor": {"lr": 0.02, "dtype": "float32", "gradient_checkpointing": False},
    "rollout.max_running": 32,
    "rollout.train_sampling_params.max_new_tokens": 8,
    "trainer.max_steps": 2,
}


def reward_fn(messages, answer):
    reply = messages[-1]["content"]
    return sum(letter in answer for letter in reply) / max(len(reply), 1)


@pytest.fixture(scope="module")
def launcher():
    """The process that starts those of `launch`, which stays."""
    return start_server(ROOT)


def train_ppo(model, name="run", **others):
    """Trains on the letter task, where `others` do not say otherwise."""
    task = {"rows": LETTER_ROWS, "reward_fn": reward_fn, "trainer.experiment_name": name}
    return rl2.train("ppo", model_name=model, **KEYS | task | others)


def train_in_event_loop(*arguments, **keys):
    async def train():
        run = train_ppo(*arguments, **keys)
        await asyncio.sleep(0)  # the loop goes on
        return run

    return asyncio.run(train())


def words(keys):
    return [f"{key}={show_value(value)}" for key, value in flatten(keys)]


def weights(run):
    return (run.model_path / "model.safetensors").read_bytes()


def list_activity():
    """The threads and child processes. The thread of tqdm, which any bar starts, does not count."""
    threads = {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}
    return threads | set(psutil.Process().children(recursive=True))


def describe_process():
    """What else a run must leave as it was."""
    environment = dict(os.environ)
    environment.pop("PYTEST_CURRENT_TEST")
    return {
        "environment": environment,
        "handlers": [signal.getsignal(number) for number in STOP_SIGNALS],
        "group": dist.is_initialized(),
        "random": torch.get_rng_state().tolist(),
        "switch": sys.getswitchinterval(),
    }


@pytest.fixture
def unchanged_process():
    """Fails the test if it changes the process. Threads that are told to end have ten seconds."""
    before, activity_before = describe_process(), list_activity()
    yield
    after = describe_process()
    assert {name: value for name, value in after.items() if value != before[name]} == {}
    deadline = time.monotonic() + 10
    while list_activity() - activity_before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list_activity() - activity_before == set()


def test_a_weight_that_the_engine_lacks_after_the_first_update_ends_the_run(model, monkeypatch):
    """At the start both sides have read the same files; only an update shows what is not sent."""
    load_weights = LocalEngine.load_weights

    def forget_one(engine, named_tensors, version):
        old = engine.model.model.norm.weight.clone()
        load_weights(engine, named_tensors, version)
        engine.model.model.norm.weight.data.copy_(old)

    monkeypatch.setattr(LocalEngine, "load_weights", forget_one)
    with pytest.raises(RuntimeError, match=r"1 weights of the engine .*'model\.norm\.weight'"):
        train_ppo(model, "forgetful")


def test_rows_files_and_the_command_line_give_the_same_bits(
    model, tmp_path, launcher, unchanged_process
):
    """Once with the environment in processes of its own."""
    (tmp_path / "env.py").write_text(LETTER_ENV)
    ours = train_ppo(model, "python", test_rows={"few": LETTER_ROWS[:3], "one": LETTER_ROWS[:1]})
    rows, few, one = (
        next(ours.path.glob(f"inputs/{name}-*.jsonl"))
        for name in ("rows", "test_rows_few", "test_rows_one")
    )
    paths = rl2.train(
        "ppo",
        rows=rows,
        test_rows={"few": few, "one": LETTER_ROWS[:1]},
        env=tmp_path / "env.py",
        **{**KEYS, "actor.model_name": model, "rollout.env_isolation": "process"},
        trainer={"experiment_name": "paths"},
    )
    files = [f"data.path={rows}", f"data.test_path={{few:{few},one:{one}}}"]
    files += ["rollout.env_path=env.py", f"actor.model_name={model}"]
    name = "trainer.experiment_name=shell"
    launch(1, "-m", "rl2.trainer.ppo", *words(KEYS), *files, name)
    assert [line["step"] for line in ours.metrics] == [0, 1, 2]
    assert "test/one/reward/mean" in ours.metrics[0]
    for other in (paths, rl2.Run(tmp_path / "runs/shell")):
        assert read_untimed_metrics(ours.path) == read_untimed_metrics(other.path)
        assert weights(ours) == weights(other)
        for step in (1, 2):
            assert ours.rollouts(step) == other.rollouts(step)
        assert ours.rollouts(0, "test_few") == other.rollouts(0, "test_few")


def test_runs_follow_each_other_in_a_process(model, unchanged_process):
    errors, frozen = [], []
    gc.unfreeze()  # what the tests have loaded

    def train_in_a_run(messages, answer):
        frozen.append(gc.get_freeze_count())
        with pytest.raises(RuntimeError) as error:
            train_ppo(model, "inner")
        errors.append(str(error.value))
        return reward_fn(messages, answer)

    first = train_ppo(model, "first", reward_fn=train_in_a_run)
    assert set(errors) == {"this process is training already: call rl2.train after that run"}
    assert frozen[-1] and not gc.get_freeze_count(), "only steps leave out what has been loaded"
    for train, name in ((train_ppo, "second"), (train_in_event_loop, "third")):
        again = train(model, name)
        assert read_untimed_metrics(again.path) == read_untimed_metrics(first.path)
        assert weights(again) == weights(first)


def test_a_failing_reward_leaves_a_process_that_can_train(model, capsys, unchanged_process):
    def fail(messages, answer):
        raise KeyError("nope")

    def fail_later(messages, answer, completion_ids):
        if completion_ids:  # no reply of the trial
            raise KeyError("later")
        return 0.0

    with pytest.raises(ValueError, match="KeyError: 'nope'"):  # when it is tried
        train_ppo(model, reward_fn=fail)
    assert "loading" not in capsys.readouterr().out, "the model loads before the trial"
    with pytest.raises(RuntimeError, match="failed on .*(?s:.*)KeyError: 'later'"):
        train_in_event_loop(model, reward_fn=fail_later)
    train_ppo(model, **{"trainer.resume": "off"})


def test_a_run_that_fails_ends_its_services(model, monkeypatch):
    class Service:
        is_open = True

        def log(self, step, metrics):
            raise RuntimeError("no network")

        def close(self):
            self.is_open = False

    service = Service()
    monkeypatch.setattr(loggers, "start_wandb", lambda *run: service)
    with pytest.raises(RuntimeError, match="no network"):
        train_ppo(model, **{"trainer.loggers": ["wandb"]})
    assert not service.is_open and os.path.exists("runs/run/report.html")


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)  # for the main thread, which handles it, also where another thread received it


class CtrlC:
    """A reward function that interrupts the first step `times` times."""

    def __init__(self, times):
        self.times = times

    def __call__(self, messages, answer, completion_ids):
        if completion_ids:  # no reply of the trial
            times, self.times = self.times, 0
            for _ in range(times):
                interrupt()
        return reward_fn(messages, answer)


def test_ctrl_c_ends_the_trial_and_saves_the_run_that_the_same_call_resumes(
    model, monkeypatch, unchanged_process
):
    monkeypatch.setattr(signals, "SECONDS_OF_ONE_REQUEST", 0.1)
    calls = itertools.count()  # several are tried at once; a later signal would end pytest itself

    def interrupt_the_trial(messages, answer):
        if next(calls) == 0:
            interrupt()
        return reward_fn(messages, answer)

    with pytest.raises(KeyboardInterrupt):
        train_ppo(model, "trial", reward_fn=interrupt_the_trial)
    with pytest.raises(KeyboardInterrupt):
        train_ppo(model, "twice", reward_fn=CtrlC(2))
    assert not rl2.Run("runs/twice").model_path.exists()
    stopped = train_ppo(model, reward_fn=CtrlC(1))
    assert [line["step"] for line in stopped.metrics] == [1] and stopped.model_path.exists()
    resumed = train_ppo(model, reward_fn=CtrlC(0))
    assert [line["step"] for line in resumed.metrics] == [1, 2]
    whole = train_ppo(model, "whole")
    assert read_untimed_metrics(resumed.path) == read_untimed_metrics(whole.path)
    assert weights(resumed) == weights(whole)
    changed = weights(resumed)
    assert train_ppo(model, reward_fn=CtrlC(0)) == resumed  # all steps are done
    assert weights(resumed) == changed


def test_a_run_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="typo"):
        rl2.Run(tmp_path / "typo")


def test_importing_rl2_is_light():
    heavy = "{'torch', 'transformers', 'numpy', 'omegaconf', 'hydra'}"
    run("-c", f"import sys, rl2; rl2.train; assert not {heavy} & {{*sys.modules}}")


def test_a_failing_run_ends_the_processes_of_its_env_file(model, unchanged_process):
    """Also the process of an env file that leaves a process behind itself."""
    Path("env.py").write_text(
        "import subprocess\n"
        "def reward_fn(messages, completion_ids):\n"
        "    if not completion_ids:\n"  # a reply of the trial
        "        return 0.0\n"
        "    subprocess.Popen(['sleep', '60'])\n"
        "    raise KeyError('later')\n"
    )
    keys = {"rollout.env_isolation": "process", "rollout.env_concurrency": 2}
    with pytest.raises(RuntimeError, match="KeyError: 'later'"):
        train_ppo(model, env="env.py", reward_fn=None, **keys)


def test_an_agent_finds_the_model(model, unchanged_process):
    def ask(base_url, api_key, messages):
        body = json.dumps({"model": "rl2", "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    async def agent(row, base_url, api_key):
        reply = await asyncio.to_thread(ask, base_url, api_key, row["messages"])
        return reward_fn([{"content": reply}], row["answer"])

    trained = train_ppo(model, run=agent, reward_fn=None, **{"rollout.max_turns": 2})
    assert [line["reward/run"] > 0 for line in trained.metrics] == [True, True]


# That DPO learns is in test_examples.py.
@pytest.mark.parametrize(("trainer", "lr", "learns"), [("rm", 0.02, True), ("dpo", 1e-30, False)])
def test_pairs_and_numbers_of_numpy_train_and_a_run_says_if_it_learned_nothing(
    trainer, lr, learns, model, capsys, unchanged_process
):
    worker = "critic" if trainer == "rm" else "actor"
    keys = {
        "data": {"batch_size": np.int64(4), "shuffle": np.bool_(False)},
        f"{worker}.lr": np.float64(lr),
        f"{worker}.betas": [np.float32(0.875), torch.tensor(0.9375)],
        f"{worker}.dtype": "float32",
        "trainer.max_steps": np.array(6),
    }
    trained = rl2.train(trainer, rows=iter(PAIRS), test_rows=PAIRS, model_name=model, **keys)
    config = yaml.safe_load((trained.path / "config.yaml").read_text())
    assert config["data"]["batch_size"] == 4 and config["data"]["shuffle"] is False
    assert config[worker]["lr"] == lr and config[worker]["betas"] == [0.875, 0.9375]
    assert config["trainer"]["max_steps"] == 6
    kind = {"dpo": LlamaForCausalLM, "rm": LlamaForSequenceClassification}[trainer]
    loaded, tokenizer = trained.load()
    assert isinstance(loaded, kind) and tokenizer.chat_template
    last = trained.metrics[-1]
    assert last["test/accuracy_stderr"] is not None and (last["test/accuracy"] == 1) >= learns
    output = capsys.readouterr().out
    assert ("did not lower test/loss" in output) == (not learns)
    assert ("did not lower test/loss" in (trained.path / "report.html").read_text()) == (not learns)


def test_other_rows_or_functions_are_another_experiment(model):
    scale = 0.5

    def scaled(messages):
        return scale * len(messages)

    [record] = train_ppo(model, reward_fn=scaled).path.glob("inputs/env-*.py")
    with pytest.raises(ValueError, match="another experiment:\n.*rollout.env_path"):
        train_ppo(model, reward_fn=lambda messages: 1.0)
    with pytest.raises(ValueError, match="another experiment:\n.*data.path"):
        train_ppo(model, rows=LETTER_ROWS[1:], reward_fn=scaled)
    assert "scale * len(messages)" in record.read_text()
    with pytest.raises(ValueError, match="given to rl2.train by Python code"):
        import_env_file(str(record))


WRONG = {
    "trainer='pppo': did you mean ppo?": dict(trainer="pppo"),
    "2 problems in the configuration:(?s:.*)did you mean actor.lr": {
        "actor.lrr": 1e-5,
        "trainer.nix": 1,
    },
    "data.path is missing": dict(trainer="sft", rows=None, reward_fn=None),
    r"rows\[1\]: expected a dict, got 'messages'": dict(rows=[{}, "messages"]),
    r"rows\[0\]\['day'\]: .*not JSON serializable; rows are": dict(rows=[{"day": object()}]),
    r"rows\[0\]\['answer'\]: the key 1 is not": dict(rows=[{"answer": [{1: 2}]}]),
    r"rows\[0\]\['answer'\]: .*surrogates not allowed": dict(rows=[{"answer": "\ud800"}]),
    "data.path and rows: both set data.path": {"data.path": "rows.jsonl"},
    "actor.lr and actor.lr: both": {"actor": {"lr": 1e-5}, "actor.lr": 1e-4},
    "env and reward_fn: both set rollout.env_path": dict(env="gsm8k"),
    "reward_fn: rm has no environment": dict(trainer="rm"),
    "env_isolation=process: other processes cannot call reward_fn": {
        "rollout.env_isolation": "process"
    },
    "make_env raised": dict(make_env=3),
    **{
        f"{name}: expected a function": {name: 3}
        for name in ("reward_fn", "interact", "group_reward_fn", "run", "play")
    },
    "malformed rows in .*inputs/rows": dict(rows=[{"text": "a"}]),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_work_is_refused_in_words(message, model, unchanged_process):
    arguments = {"trainer": "ppo", "rows": LETTER_ROWS, "reward_fn": reward_fn, "model_name": model}
    arguments = {**arguments, **WRONG[message]}
    with pytest.raises(ValueError, match=message):
        rl2.train(arguments.pop("trainer"), **arguments)


def test_torchrun_and_a_foreign_process_group_are_refused(model, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="torchrun has started this one"):
        train_ppo(model)
    monkeypatch.delenv("RANK")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="destroy_process_group"):
        train_ppo(model)
    assert dist.is_initialized()
    dist.destroy_process_group()
