"""Tests the real SGLang on a CPU: contract, sharded workers, failed start, whole runs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip(
    "sglang.srt", reason="run by tests/sglang/run.sh, in an environment with sglang"
)
from common import ROOT, make_model, torchrun  # noqa: E402
from engine_runs import (  # noqa: E402
    check_failed_start,
    check_partial_rollouts,
    learn,
)

ONE_CORE = {"SGLANG_CPU_OMP_THREADS_BIND": "0"}
MEMORY = "rollout.engine_args.max_total_tokens=4096"


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
        ROOT / "tests/engine_contract.py",
        "sglang",
        name,
        tp_size,
        actor_tp_size,
        env={"SGLANG_CPU_OMP_THREADS_BIND": bind},
    )
    assert done.stdout.count("is done") == world


def test_the_contract_with_experts(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    name = make_model(tmp_path / "qwen3_moe", "qwen3_moe", tied=False, **sizes)
    done = torchrun(1, ROOT / "tests/engine_contract.py", "sglang", name, env=ONE_CORE)
    assert done.stdout.count("is done") == 1


def test_a_run_learns(tmp_path, tied):
    learn(tmp_path, tied, "sglang", MEMORY, env=ONE_CORE)


def test_a_run_with_partial_rollouts(tmp_path, tied):
    words = [MEMORY, "actor.correction=token_tis"]
    check_partial_rollouts(tmp_path, tied, "sglang", *words, env=ONE_CORE)


def test_a_start_that_fails_says_why(tmp_path, tied):
    done = check_failed_start(tmp_path, tied, "sglang", "SGLang", "attention_backend")
    assert "nonsense" in done.stderr + done.stdout
