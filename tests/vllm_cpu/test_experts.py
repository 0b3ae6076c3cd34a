"""Tests mixtures of experts in the real vLLM on a CPU: loads, wrong weights, whole runs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm", reason="run by tests/vllm_cpu/run.sh, in an environment with vllm")
from common import VLLM_SIZES, letter_run, make_model, read_metrics, torchrun  # noqa: E402
from workers import answer, gap, make_worker, update  # noqa: E402

pytestmark = pytest.mark.usefixtures("group")
EXPERTS = {
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    # vLLM's kernel makes its experts wider, with zeros.
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}


def send(engine, worker):
    """As the trainer does after an update."""
    engine.sleep()
    engine.wake()
    engine.load_weights(worker.iter_full_weights(worker.dtype), worker.version)


def verify(engine, worker):
    engine.verify_weights(worker.iter_full_weights(worker.dtype), worker.version)


def check_updates(engine, worker, limit):
    """The engine has the weights of its files, and those of each update, and computes with them."""
    verify(engine, worker)
    start = answer(engine)
    assert gap(worker, start) < limit
    update(worker)
    send(engine, worker)
    verify(engine, worker)
    assert gap(worker, answer(engine)) < limit
    assert gap(worker, start) > 20 * limit, "the update changes nothing that could be seen"


def check_wrong_weight(engine, worker, name):
    """One number that is wrong on its way is found."""

    def wrong():
        for key, weight in worker.iter_full_weights(worker.dtype):
            if key == name:
                weight = weight.clone()
                weight.view(-1)[weight.numel() // 3] += 1
            yield key, weight

    with pytest.raises(RuntimeError, match=r"1 weights of vLLM are not the trainer's"):
        engine.verify_weights(wrong(), worker.version)
    send(engine, worker)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts(tmp_path, engine_of, family):
    name = make_model(tmp_path / family, family, tied=False, **{**VLLM_SIZES, **EXPERTS[family]})
    worker = make_worker(name)
    engine = engine_of(worker)
    check_updates(engine, worker, 2e-5)
    for key, weight in worker.model.hf.state_dict().items():
        if "layers.1.mlp" in key and weight.is_floating_point():  # experts, routers, buffers
            check_wrong_weight(engine, worker, key)
    verify(engine, worker)


def test_a_run_trains_experts(tmp_path):
    """All weights are compared in every step; each rank of the engine has a part of each expert."""
    sizes = {**VLLM_SIZES, **EXPERTS["qwen3_moe"]}
    name = make_model(tmp_path / "qwen3_moe", "qwen3_moe", tied=False, **sizes)
    torchrun(
        2,
        *["-m", "rl2.trainer.ppo", *letter_run(tmp_path, name)],
        "rollout.engine=vllm",
        "rollout.tp_size=2",
        "rollout.check_weights=true",
        "trainer.max_steps=3",
        f"trainer.save_dir={tmp_path / 'run'}",
    )
    lines = read_metrics(tmp_path / "run")
    assert len(lines) == 3
    assert all((line["actor/mismatch_logp_difference"] or 0) < 1e-4 for line in lines)
