"""Tests the real SGLang on a CPU: contract, sharded workers, failed start, whole runs."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip(
    "sglang.srt", reason="run by tests/sglang/run.sh, in an environment with sglang"
)
from common import letter_run, make_model, read_metrics, torchrun  # noqa: E402

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "llama", "llama", tied=True)


@pytest.mark.parametrize(
    ("world", "tp_size", "actor_tp_size"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)]
)
def test_the_contract(request, world, tp_size, actor_tp_size):
    name = request.getfixturevalue("tied" if world == 1 else "model")
    bind = "|".join(str(i) for i in range(tp_size))
    done = torchrun(
        world,
        HERE / "contract.py",
        name,
        tp_size,
        actor_tp_size,
        env={"SGLANG_CPU_OMP_THREADS_BIND": bind},
    )
    assert done.stdout.count("is done") == world


def test_the_contract_with_experts(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    name = make_model(tmp_path / "qwen3_moe", "qwen3_moe", tied=False, **sizes)
    done = torchrun(1, HERE / "contract.py", name, 1, 1, env={"SGLANG_CPU_OMP_THREADS_BIND": "0"})
    assert done.stdout.count("is done") == 1


def arguments(tmp_path, model):
    return ["-m", "rl2.trainer.ppo", *letter_run(tmp_path, model)]


def test_a_run_learns_as_with_the_local_engine(tmp_path, tied):
    rewards = {}
    for engine in ("local", "sglang"):
        more = ["rollout.engine_args.max_total_tokens=4096"] if engine == "sglang" else []
        command = [
            *arguments(tmp_path, tied),
            f"rollout.engine={engine}",
            f"trainer.save_dir={tmp_path / engine}",
            *more,
        ]
        torchrun(2, *command, env={"SGLANG_CPU_OMP_THREADS_BIND": "0"})
        lines = read_metrics(tmp_path / engine)
        assert all((line["actor/mismatch_logp_difference"] or 0) < 1e-4 for line in lines)
        rewards[engine] = [line["reward/mean"] for line in lines]
    for means in rewards.values():
        assert means[0] < 0.25 and sum(means[-3:]) / 3 > 0.6
    # A step has 32 samples with a standard deviation of about 0.3. The runs diverge later, but
    # their first steps agree within this noise.
    assert abs(rewards["local"][0] - rewards["sglang"][0]) < 0.15


def test_a_run_with_partial_rollouts(tmp_path, tied):
    command = [
        *arguments(tmp_path, tied),
        "rollout.engine=sglang",
        "rollout.engine_args.max_total_tokens=4096",
        "rollout.partial=true",
        "actor.correction=token_tis",
        "rollout.max_running=12",
        "trainer.max_steps=6",
        "rollout.check_weights=true",
        "rollout.train_sampling_params.max_new_tokens=24",
        "rollout.train_sampling_params.stop=[q]",
        f"trainer.save_dir={tmp_path / 'run'}",
    ]
    torchrun(2, *command, env={"SGLANG_CPU_OMP_THREADS_BIND": "0"})
    lines = read_metrics(tmp_path / "run")
    assert len(lines) == 6 and any(line["rollout/staleness"] > 0 for line in lines)
    records = [
        json.loads(line)
        for path in (tmp_path / "run/rollouts/train").iterdir()
        for line in path.read_text().splitlines()
    ]
    assert len(records) == 6 * 32 and all(
        sum(n for _, n in r["versions"]) == r["length"] for r in records
    )
    replies = [(r["messages"][-1]["content"], r["finish_reason"]) for r in records]
    stopped = [(reply, reason) for reply, reason in replies if "q" in reply]
    assert len(stopped) > 5 and all(reason == "stop" for _, reason in stopped)
    assert all(reply.index("q") == len(reply) - 1 for reply, _ in stopped)


def test_a_start_that_fails_says_why(tmp_path, tied):
    command = [
        *arguments(tmp_path, tied),
        "rollout.engine=sglang",
        f"trainer.save_dir={tmp_path / 'run'}",
    ]
    done = torchrun(1, *command, "rollout.engine_args.attention_backend=nonsense", check=False)
    assert done.returncode != 0
    assert "SGLang did not start" in done.stderr and "nonsense" in done.stderr + done.stdout


def test_an_evaluation_without_training(tmp_path, tied):
    """No weights are sent: SGLang answers with those that it has loaded itself."""
    command = [
        *arguments(tmp_path, tied),
        f"data.test_path={tmp_path / 'train.jsonl'}",
        "rollout.engine=sglang",
        "rollout.engine_args.max_total_tokens=4096",
        "trainer.eval_only=true",
        f"trainer.save_dir={tmp_path / 'run'}",
    ]
    torchrun(1, *command, env={"SGLANG_CPU_OMP_THREADS_BIND": "0"})
    (metrics,) = read_metrics(tmp_path / "run")
    assert 0 <= metrics["test/reward/mean"] <= 1
