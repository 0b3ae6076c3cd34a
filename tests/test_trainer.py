"""Whole runs of rl2.trainer.ppo under torchrun on a tiny random model: rewards that rise, files,
kill and resume."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from common import ROOT, check_adapter, make_model, torchrun
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TIMED = ("time/", "memory/", "tokens/per_second")
# The share of a few letters: a policy that answers at random starts near 8/98 and can learn it in a
# few steps.
LETTER_ENV = """
    def reward_fn(messages, answer):
        reply = messages[-1]["content"]
        return sum(letter in answer for letter in reply) / max(len(reply), 1)
"""


@pytest.fixture
def setup(tmp_path):
    """Arguments of a small run: a model, a data set and an env file in `tmp_path`."""
    rows = [
        {"messages": [{"role": "user", "content": f"say a, {i}"}], "answer": "abcdefgh"}
        for i in range(24)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "env.py").write_text(textwrap.dedent(LETTER_ENV))
    return [
        f"actor.model_name={make_model(tmp_path / 'tiny')}",
        f"data.path={tmp_path / 'train.jsonl'}",
        f"rollout.env_path={tmp_path / 'env.py'}",
        f"trainer.save_dir={tmp_path / 'run'}",
        "data.prompts_per_rollout=4",
        "data.responses_per_prompt=8",
        "data.max_length=64",
        "actor.lr=0.02",
        "actor.dtype=float32",
        "rollout.max_running=32",
        "rollout.train_sampling_params.max_new_tokens=8",
        "actor.gradient_checkpointing=false",
        "trainer.n_epochs=2",
        "trainer.disable_wandb=true",
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(folder):
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in metrics(folder)]


def test_grpo_learns_and_leaves_what_it_promises(setup, tmp_path):
    test = [
        f"data.test_path={tmp_path / 'train.jsonl'}",
        "rollout.test_sampling_params.max_new_tokens=8",
    ]
    done = torchrun(2, "-m", "rl2.trainer.ppo", *setup, *test, "trainer.test_freq=6")
    run = tmp_path / "run"
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(13))
    rewards = [line["reward/mean"] for line in lines[1:]]
    assert rewards[0] < 0.2 and rewards[-1] > 0.7
    assert [line["step"] for line in lines if "test/reward/mean" in line] == [0, 6, 12]
    assert all((line["actor/mismatch_logp_difference"] or 0) < 1e-4 for line in lines[1:])
    assert all(line["actor/ratio"] in (None, pytest.approx(1)) for line in lines[1:])
    records = [
        json.loads(line) for line in (run / "rollouts/train/step_12.jsonl").read_text().splitlines()
    ]
    assert [record["id"] for record in records] == list(range(32))
    assert {"messages", "rewards", "reward", "length", "finish_reason", "advantage"} <= records[
        0
    ].keys()
    assert sum(record["reward"] for record in records) / 32 == pytest.approx(rewards[-1])
    for group in range(4):
        assert sum(r["advantage"] for r in records if r["group"] == group) == pytest.approx(
            0, abs=1e-5
        )
    assert len(list((run / "rollouts/test").iterdir())) == 3
    assert (run / "config.yaml").exists()
    AutoModelForCausalLM.from_pretrained(run / "model")
    AutoTokenizer.from_pretrained(run / "model")
    assert "step 12/12" in done.stdout + done.stderr and "loading" in done.stdout


def test_ppo_with_a_critic_and_kl_learns(setup, tmp_path):
    extra = [
        "adv.estimator=gae",
        "adv.norm_var=true",
        "critic.lr=0.02",
        "critic.dtype=float32",
        "kl.coef=0.001",
        "kl.type=reward",
        "actor.update_per_rollout=2",
        "critic.update_per_rollout=2",
        "actor.freeze_steps=1",
        "actor.entropy=0.001",
        "actor.correction=token_tis",
        "actor.scheduler=cosine",
        "actor.warmup_ratio=0.1",
    ]
    torchrun(2, "-m", "rl2.trainer.ppo", *setup, *extra)
    lines = metrics(tmp_path / "run")
    assert (
        "actor/loss" not in lines[0]
        and lines[0]["critic/loss"] > 0
        and lines[1]["actor/kl"] == pytest.approx(0, abs=1e-3)
    )
    assert lines[-1]["reward/mean"] > lines[0]["reward/mean"] + 0.3
    assert lines[-1]["actor/entropy"] < lines[1]["actor/entropy"]
    assert lines[-1]["actor/lr"] < lines[3]["actor/lr"]


@pytest.mark.parametrize(
    "layout", ["actor.sp_size=2 critic.fsdp_size=1", "actor.tp_size=2 critic.sp_size=2"]
)
def test_other_layouts_train_to_the_same_policy(setup, tmp_path, layout):
    """Three steps of PPO with a reference, each worker with a layout of its own, against FSDP over
    both processes."""
    more = [
        "trainer.max_steps=3",
        "adv.estimator=gae",
        "critic.lr=0.01",
        "critic.dtype=float32",
        "kl.coef=0.01",
    ]
    command = [
        "-m",
        "rl2.trainer.ppo",
        *setup,
        *more,
        "kl.type=loss",
        "actor.update_per_rollout=2",
        "actor.lr=0.001",
    ]
    torchrun(2, *command)
    torchrun(2, *command, *layout.split(), f"trainer.save_dir={tmp_path / 'other'}")
    for one, other in zip(metrics(tmp_path / "run"), metrics(tmp_path / "other"), strict=True):
        for key in (
            "reward/mean",
            "actor/loss",
            "actor/kl",
            "actor/grad_norm",
            "critic/loss",
            "actor/lr",
        ):
            assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5), (one["step"], key)


def test_turns_with_a_tool_and_exports_that_start_another_run(setup, tmp_path):
    """The env answers the first turn; the exported actor and optimizer are where the next run
    begins."""
    interact = """
    def interact(messages):
        turns = sum(m["role"] == "assistant" for m in messages)
        return [{"role": "tool", "content": "go on"}] if turns < 2 else []
    """
    (tmp_path / "env.py").write_text(textwrap.dedent(LETTER_ENV) + textwrap.dedent(interact))
    more = ["rollout.max_turns=3", "trainer.max_steps=2", f"actor.save_dir={tmp_path / 'exports'}"]
    more += [
        "actor.save_freq=2",
        "actor.save_optimizer=true",
        "rollout.train_sampling_params.max_new_tokens=16",
    ]
    torchrun(2, "-m", "rl2.trainer.ppo", *setup, *more)
    records = [
        json.loads(x)
        for x in (tmp_path / "run/rollouts/train/step_2.jsonl").read_text().splitlines()
    ]
    for record in records:
        roles = [message["role"] for message in record["messages"]]
        assert roles == ["user", "assistant", "tool", "assistant"][: 2 * record["num_turns"]]
        assert record["num_turns"] == 2 or record["finish_reason"] == "length"
    assert any(record["num_turns"] == 2 for record in records)
    exported = tmp_path / "exports/step_2"
    whole, part = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "run/model", exported)
    )
    assert all((whole[key] == part[key]).all() for key in whole)
    again = [
        f"actor.model_name={exported}",
        f"trainer.save_dir={tmp_path / 'again'}",
        "trainer.max_steps=1",
    ]
    torchrun(1, "-m", "rl2.trainer.ppo", *setup, *again, f"actor.optimizer_dir={exported}")
    torchrun(1, "-m", "rl2.trainer.ppo", *setup, *again, f"trainer.save_dir={tmp_path / 'fresh'}")
    moments, fresh = (
        load_file(tmp_path / name / "model/model.safetensors") for name in ("again", "fresh")
    )
    assert any((moments[key] != fresh[key]).any() for key in fresh), (
        "the optimizer that was exported changed nothing"
    )


def test_a_killed_run_resumes_bit_for_bit(setup, tmp_path):
    """SIGKILL in mid-step, from within the environment of one rank; the run that was never killed
    ends the same."""
    env = (
        LETTER_ENV
        + """
    import os, random, signal
    calls = 0
    plain = reward_fn
    def reward_fn(messages, answer):
        global calls
        calls += 1
        if calls == int(os.environ.get("KILL_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(messages, answer)
    """
    )
    (tmp_path / "env.py").write_text(textwrap.dedent(env))
    more = [
        "trainer.save_freq=2",
        "trainer.max_steps=5",
        "adv.estimator=gae",
        "critic.lr=0.01",
        "critic.dtype=float32",
    ]
    command = ["-m", "rl2.trainer.ppo", *setup, *more]
    torchrun(2, *command, f"trainer.save_dir={tmp_path / 'whole'}")
    # Four calls of the preflight, then 16 a step on each of two ranks: the 60th is in the fourth
    # step.
    killed = torchrun(2, *command, check=False, env={"KILL_AT": "60"})
    assert killed.returncode != 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    (tmp_path / "run/checkpoints/step_4.partial").mkdir()  # as if it had been saving
    resumed = torchrun(2, *command)
    assert "step_2" in resumed.stdout + resumed.stderr
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")
    one, other = (
        load_file(tmp_path / name / "model/model.safetensors") for name in ("run", "whole")
    )
    assert all((one[key] == other[key]).all() for key in other)
    for step in range(1, 6):
        names = [tmp_path / name / f"rollouts/train/step_{step}.jsonl" for name in ("run", "whole")]
        assert names[0].read_text() == names[1].read_text()


def test_partial_rollouts_train_every_prompt_once_and_resume(setup, tmp_path):
    """Answers go on under newer weights; what was paused is in the checkpoint, so that a resumed
    run, here by one process instead of two, still trains every prompt of every epoch once."""
    more = [
        "rollout.partial=true",
        "actor.correction=token_tis",
        "trainer.save_freq=3",
        "rollout.max_running=12",
    ]
    more += [
        "data.shuffle=false",
        "rollout.train_sampling_params.max_new_tokens=16",
        "data.max_length=100",
    ]
    torchrun(2, "-m", "rl2.trainer.ppo", *setup, *more, "trainer.max_steps=7")
    done = torchrun(1, "-m", "rl2.trainer.ppo", *setup, *more)
    assert "step_6: 6 of 12 steps are done" in done.stdout
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert (
        any(line["rollout/staleness"] > 0 for line in lines)
        and sum(line["reward/mean"] for line in lines[-3:]) > 1
    )
    asked, newest = {}, []
    for step in range(1, 13):
        path = tmp_path / f"run/rollouts/train/step_{step}.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(records) == 32 and len({record["id"] for record in records}) == 32
        for record in records:
            assert sum(num for _, num in record["versions"]) == record["length"]
            assert all(version < step for version, _ in record["versions"])
            asked[record["messages"][0]["content"]] = (
                asked.get(record["messages"][0]["content"], 0) + 1
            )
        newest.append(max(version for record in records for version, _ in record["versions"]))
    assert set(asked.values()) == {2 * 8} and len(asked) == 24
    # What a step starts early the next one ends, so a step can train on answers that were all done
    # before its weights.
    assert all(step - 1 <= version <= step for step, version in enumerate(newest)), newest


def test_lora_with_its_base_as_the_reference(setup, tmp_path):
    """The policy leaves the reference, which is the base; a run that goes on from a checkpoint ends
    with the same bits."""
    more = [
        "actor.lora_rank=4",
        "kl.coef=0.01",
        "kl.type=reward",
        "trainer.max_steps=4",
        "trainer.save_freq=2",
    ]
    more += ["adv.estimator=gae", "critic.lr=0.01", "critic.dtype=float32", "critic.lora_rank=2"]
    again = [
        f"trainer.resume={tmp_path / 'run/checkpoints/step_2'}",
        f"trainer.save_dir={tmp_path / 'again'}",
    ]
    torchrun(2, "tests/several.py", "ppo", *setup, *more, "--", "ppo", *setup, *more, *again)
    lines = metrics(tmp_path / "run")
    assert lines[0]["actor/kl"] == 0 and all(line["actor/kl"] > 1e-3 for line in lines[1:])
    assert all(abs(line["actor/mismatch_logp_difference"]) < 1e-4 for line in lines), (
        "the engine lacks the adapters"
    )
    assert untimed(tmp_path / "again") == [
        line for line in untimed(tmp_path / "run") if line["step"] > 2
    ]
    one, other = (
        load_file(tmp_path / name / "model/model.safetensors") for name in ("run", "again")
    )
    assert all((one[key] == other[key]).all() for key in one)
    check_adapter(AutoModelForCausalLM, tmp_path / "tiny", tmp_path / "run/model")


def test_a_signal_finishes_the_step_and_saves(setup, tmp_path):
    (tmp_path / "env.py").write_text(
        textwrap.dedent(LETTER_ENV)
        + "\nimport time\nplain = reward_fn\ndef reward_fn(messages, answer):\n"
        "    time.sleep(0.02)\n    return plain(messages, answer)\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "rl2.trainer.ppo",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, *setup, "trainer.n_epochs=1000"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.time() + 120
    while not (tmp_path / "run/metrics.jsonl").exists() and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    done = metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / f"run/checkpoints/step_{done}/run.json").exists(), out
    assert "stopping" in out and f"step {done}/6000" in out
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 1


def test_a_model_too_short_for_the_trajectories_is_refused(setup):
    done = torchrun(
        1,
        "-m",
        "rl2.trainer.ppo",
        *setup,
        "rollout.train_sampling_params.max_new_tokens=500",
        check=False,
    )
    assert "has 512 positions" in done.stderr and "loading" not in done.stdout


def test_what_is_wrong_is_said_before_the_model_loads(setup, tmp_path):
    (tmp_path / "env.py").write_text(
        "def reward_fn(messages, answer):\n    return undefined_name\n"
    )
    done = torchrun(1, "-m", "rl2.trainer.ppo", *setup, check=False)
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert "undefined_name" in text and "env.py" in text and "loading" not in done.stdout
    assert (
        "rl2/trainer/ppo.py" not in text.split("ChildFailedError")[0]
    )  # the user's mistake, not our traceback


def test_two_nodes_train_and_resume(setup, tmp_path):
    """Two torchrun agents that meet on loopback, as two machines would; then one agent of two
    processes goes on."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=1",
        "--rdzv_backend=c10d",
    ]
    command += [
        f"--rdzv_endpoint=127.0.0.1:{free_port()}",
        "-m",
        "rl2.trainer.ppo",
        *setup,
        "trainer.save_freq=1",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for steps in (2, 3):
        agents = [
            subprocess.Popen(
                [*command, f"trainer.max_steps={steps}", "actor.sp_size=2"],
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for _ in range(2)
        ]
        told = [agent.communicate(timeout=120)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], told
    assert "2 of 3 steps are done" in "".join(told)
    torchrun(2, "-m", "rl2.trainer.ppo", *setup, "trainer.max_steps=4", "actor.sp_size=2")
    torchrun(
        2,
        "-m",
        "rl2.trainer.ppo",
        *setup,
        "trainer.max_steps=4",
        "actor.sp_size=2",
        f"trainer.save_dir={tmp_path / 'one'}",
    )
    assert untimed(tmp_path / "run") == untimed(tmp_path / "one"), "nodes change the numbers"
