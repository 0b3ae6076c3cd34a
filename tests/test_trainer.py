"""Whole runs of rl2.trainer.ppo under torchrun with a tiny random model.

They test that rewards rise, which files a run writes, and that killed runs resume.
"""

import json
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from common import (
    ROOT,
    keep_process,
    launch,
    launch_runs,
    letter_run,
    make_model,
    make_tokenizer,
    read_jsonl,
    read_metrics,
    read_untimed_metrics,
    run,
    same_weights,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl2.config.parse import parse
from rl2.config.schema import PPOConfig
from rl2.data.chat import ChatTemplate
from rl2.ppo_inputs import make_prompts, read_ppo_inputs
from rl2.ppo_setup import set_up

PPO = ("-m", "rl2.trainer.ppo")


@pytest.fixture
def setup(model, tmp_path):
    """Arguments of a small run: a data set and an env file in `tmp_path`."""
    return [*letter_run(tmp_path, model), f"trainer.save_dir={tmp_path / 'run'}"]


def train(world, *arguments, **options):
    """Run rl2.trainer.ppo with `world` processes."""
    return launch(world, *PPO, *arguments, **options)


def test_grpo_learns_and_writes_its_files(setup, tmp_path):
    exports = tmp_path / "exports"
    keys = [
        f"data.test_path={tmp_path / 'train.jsonl'}",
        "rollout.test_sampling_params.max_new_tokens=8",
        "trainer.test_freq=6",
        "trainer.save_best=auto",
        f"actor.save_dir={exports}",
        "actor.save_freq=6",
        "actor.save_optimizer=true",
    ]
    done = train(2, *setup, *keys)
    assert "no checkpoints" not in done.stdout
    run = tmp_path / "run"
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(13))
    rewards = [line["reward/mean"] for line in lines[1:]]
    assert rewards[0] < 0.2 and rewards[-1] > 0.7
    assert [line["step"] for line in lines if "test/reward/mean" in line] == [0, 6, 12]
    assert all(line.get("actor/mismatch_logp_difference", 0) < 1e-4 for line in lines[1:])
    assert all(line.get("actor/ratio", 1) == pytest.approx(1) for line in lines[1:])
    records = read_jsonl(run / "rollouts/train/step_12.jsonl")
    assert [record["id"] for record in records] == list(range(32))
    keys = {"messages", "rewards", "reward", "length", "finish_reason", "advantage"}
    assert keys <= records[0].keys()
    assert sum(record["reward"] for record in records) / 32 == pytest.approx(rewards[-1])
    for group in range(4):
        advantages = [record["advantage"] for record in records if record["group"] == group]
        assert sum(advantages) == pytest.approx(0, abs=1e-5)
    assert len(list((run / "rollouts/test").iterdir())) == 3
    config = (run / "config.yaml").read_text()
    assert "max_length_per_device: 8192" in config  # not auto: what it was here
    AutoModelForCausalLM.from_pretrained(run / "model")
    AutoTokenizer.from_pretrained(run / "model")
    tests = {line["step"]: line["test/reward/mean"] for line in lines if line["step"] in (6, 12)}
    best = max(tests, key=tests.get)
    assert json.loads((run / "run.json").read_text())["best"]["step"] == best
    assert (run / f"checkpoints/step_{best}").exists()
    assert same_weights(run / "best_model", exports / f"step_{best}")
    assert same_weights(run / "model", exports / "step_12")
    assert not same_weights(run / "model", exports / "step_6")
    assert (exports / "step_12/optimizer").exists()  # test_checkpoint.py reads one
    assert "step 12/12" in done.stdout + done.stderr and "loading" in done.stdout


def test_ppo_with_adapters_a_critic_and_kl_learns(setup, tmp_path):
    """The reference is the base model. test_all_layouts_train_the_same_policy has no adapters."""
    extra = [
        "actor.lora_rank=8",
        "critic.lora_rank=2",
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
    train(1, *setup, *extra)
    lines = read_metrics(tmp_path / "run")
    assert "actor/loss" not in lines[0]
    assert lines[0]["critic/loss"] > 0
    assert lines[1]["actor/kl"] == 0 and all(line["actor/kl"] > 1e-3 for line in lines[3:])
    mismatches = [abs(line["actor/mismatch_logp_difference"]) for line in lines[1:]]
    assert all(mismatch < 1e-4 for mismatch in mismatches), "the engine lacks the adapters"
    assert lines[-1]["reward/mean"] > lines[0]["reward/mean"] + 0.3
    assert lines[-1]["actor/entropy"] < lines[1]["actor/entropy"]
    assert lines[-1]["actor/lr"] < lines[3]["actor/lr"]


def test_all_layouts_train_the_same_policy(setup, tmp_path):
    """Two steps of PPO with a critic and a reference.

    test_worker.py compares every layout with one process.
    """
    layouts = {
        "sp_and_replicas": "actor.sp_size=2 critic.fsdp_size=1",
        "tp_and_sp": "actor.tp_size=2 critic.tp_size=1 critic.sp_size=2",
    }
    arguments = [
        *setup,
        "trainer.max_steps=2",
        "adv.estimator=gae",
        "critic.lr=0.01",
        "critic.dtype=float32",
        "kl.coef=0.01",
        "kl.type=loss",
        "data.batch_size=16",
        "adv.bootstrap=true",
        "actor.lr=0.001",
        "rollout.train_sampling_params.top_k=20",
    ]
    keys = ["reward/mean", "actor/loss", "actor/kl", "actor/grad_norm", "critic/loss", "actor/lr"]
    runs = []
    for name, layout in layouts.items():
        runs.append(["ppo", *arguments, *layout.split(), f"trainer.save_dir={tmp_path / name}"])
    done = launch_runs(2, runs)
    # Neither transformers' report of the critic's new head nor torch's warning of two gathers.
    assert "LOAD REPORT" not in done.stderr and "redistributing" not in done.stderr
    for expected, line in zip(*(read_metrics(tmp_path / name) for name in layouts), strict=True):
        for key in keys:
            value = pytest.approx(line[key], rel=1e-3, abs=1e-5)
            assert expected[key] == value, (expected["step"], key)


@pytest.mark.nightly
def test_partial_rollouts_train_every_prompt_once_and_resume(setup, tmp_path):
    """Answers continue with newer weights, and checkpoints hold the paused answers.

    A run that resumes with one process instead of two trains every prompt once an epoch.
    """
    arguments = [
        *setup,
        "rollout.partial=true",
        "actor.correction=token_tis",
        f"actor.loss={ROOT}/examples/plugins/turns_and_ages.py:aged",
        "trainer.save_freq=3",
        "rollout.max_running=12",
        "rollout.train_sampling_params.top_k=90",
        "data.shuffle=false",
        "rollout.train_sampling_params.max_new_tokens=16",
        "data.max_length=100",
    ]
    train(2, *arguments, "trainer.max_steps=7")
    resumed = train(1, *arguments, f"trainer.resume={tmp_path / 'run/checkpoints/step_6'}")
    assert "step_6: 6 of 12 steps are done" in resumed.stdout
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert any(line["rollout/staleness"] > 0 for line in lines)
    for line in lines:  # what the loss is given, whichever process gets the rows
        assert line["actor/age"] == pytest.approx(line["rollout/staleness"], abs=1e-6)
    assert sum(line["reward/mean"] for line in lines[-3:]) > 1
    counts = Counter()  # of trajectories, by prompt
    for step in range(1, 13):
        records = read_jsonl(tmp_path / f"run/rollouts/train/step_{step}.jsonl")
        assert len(records) == 32 and len({record["id"] for record in records}) == 32
        for record in records:
            assert sum(num for _, num in record["versions"]) == record["length"]
            assert all(version < step for version, _ in record["versions"])
            counts[record["messages"][0]["content"]] += 1
    assert set(counts.values()) == {2 * 8} and len(counts) == 24


@pytest.mark.nightly
def test_passes_over_a_rollout_with_a_teacher_and_a_reference_that_follows_the_actor(
    setup, tmp_path
):
    """The reference is the actor after steps 2 and 4, so the KL is 0 at the start of 1, 3 and 5.

    A run that resumes between two of these steps ends with the same bits.
    """
    arguments = [
        "ppo",
        *setup,
        f"teacher.model_name={make_model(tmp_path / 'teacher', seed=1, hidden_size=48)}",
        "teacher.kl=full",
        "rollout.train_sampling_params.top_p=0.9",
        "kl.coef=0.01",
        "kl.type=reward",
        "kl.update_freq=2",
        "actor.update_per_rollout=2",
        "actor.epochs_per_rollout=2",
        "actor.skip_threshold=1.0001",
        "actor.scheduler=linear",
        "actor.min_lr_ratio=0.5",
        "trainer.max_steps=5",
        "trainer.save_freq=3",
    ]
    resume = [
        f"trainer.resume={tmp_path / 'run/checkpoints/step_3'}",
        f"trainer.save_dir={tmp_path / 'resumed'}",
    ]
    done = launch_runs(2, [arguments, [*arguments, *resume]])
    lines = read_metrics(tmp_path / "run")
    assert [line["actor/kl"] == 0 for line in lines] == [True, False, True, False, True]
    assert lines[-1]["actor/teacher_kl"] < lines[0]["actor/teacher_kl"]
    skipped = [line["actor/skipped"] for line in lines]
    assert any(0 < fraction < 1 for fraction in skipped), "an update on the policy has the ratio 1"
    assert "was above actor.skip_threshold=1.0001" in done.stdout
    last_lines = [line for line in read_untimed_metrics(tmp_path / "run") if line["step"] > 3]
    assert read_untimed_metrics(tmp_path / "resumed") == last_lines
    assert same_weights(tmp_path / "resumed/model", tmp_path / "run/model")


def test_teachers_of_other_vocabularies_are_refused(setup, tmp_path, monkeypatch):
    """Of other tokens, and of others where tensor parallelism cuts the vocabulary."""
    padded = make_model(tmp_path / "padded", vocab_size=100)
    other = make_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    monkeypatch.setenv("WORLD_SIZE", "2")
    full = ["teacher.kl=full", "actor.tp_size=2"]
    of_others = parse(PPOConfig, [*setup, f"teacher.model_name={other}"])
    of_padded = parse(PPOConfig, [*setup, f"teacher.model_name={padded}", *full])
    monkeypatch.delenv("WORLD_SIZE")
    for config, words in (
        (of_others, "'<think>' is number 99 there and None in the actor"),
        (of_padded, f"padded to 100 tokens in {padded} and to 98 in"),
    ):
        with keep_process(), pytest.raises(ValueError, match=words):
            set_up(config)


def test_a_model_with_too_few_positions_is_refused(setup):
    max_new_tokens = "rollout.train_sampling_params.max_new_tokens"
    config = parse(PPOConfig, [*setup, f"{max_new_tokens}=500"])
    rows, _ = read_ppo_inputs(config)
    with pytest.raises(ValueError, match=f"lower {max_new_tokens}"):
        make_prompts(config, rows, {"": ChatTemplate(make_tokenizer())})


@pytest.mark.nightly
def test_a_run_on_two_nodes_is_that_of_one_node_and_goes_on_there(setup, tmp_path):
    """Two torchrun agents on the loopback interface act as two nodes, bit for bit."""
    arguments = [
        *setup,
        "actor.sp_size=2",
        "trainer.save_freq=2",
        "adv.estimator=gae",
        "critic.lr=0.01",
        "critic.dtype=float32",
    ]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=1",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint=127.0.0.1:{port}",
        *PPO,
        *arguments,
        "trainer.max_steps=2",
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda node: run(*command), range(2)))
    resumed = train(2, *arguments, "trainer.max_steps=3")
    assert "step_2: 2 of 3 steps are done" in resumed.stdout
    whole = tmp_path / "whole"
    train(2, *arguments, "trainer.max_steps=3", f"trainer.save_dir={whole}")
    assert read_untimed_metrics(tmp_path / "run") == read_untimed_metrics(whole)
    assert same_weights(tmp_path / "run/model", whole / "model")
    for path in whole.glob("rollouts/train/*.jsonl"):
        assert path.read_bytes() == (tmp_path / "run" / path.relative_to(whole)).read_bytes()
