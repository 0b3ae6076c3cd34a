"""Tests other kinds of models in the real vLLM on a CPU: windows, experts, states, caps, towers."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm", reason="run by tests/vllm_cpu/run.sh, in an environment with vllm")
from common import (  # noqa: E402
    GATED_DELTA,
    SPECIAL,
    VLLM_SIZES,
    WINDOWED,
    letter_run,
    make_model,
    read_metrics,
    torchrun,
)
from engine_contract import play  # noqa: E402
from parity import make_batch, policy_loss, worker_config  # noqa: E402
from test_special_models import save_family  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from rl2.batch import Sample, collate  # noqa: E402
from rl2.worker import Worker  # noqa: E402

pytestmark = pytest.mark.usefixtures("group")
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = {
    "deepseek_v3": {
        **EXPERTS,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
        # Of the released model: transformers does not read them, vLLM does.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16},
    "gemma2": {**SPECIAL["gemma2"], "initializer_range": 0.05, "tied": True},  # with caps
    "gemma3_text": WINDOWED["gemma3_text"],
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "lfm2_moe": {
        **EXPERTS,
        "num_experts": 4,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
        "tied": True,
    },
    "mistral": WINDOWED["mistral"],
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {},
    "qwen3": {},
    # vLLM's kernel makes its experts wider, with zeros.
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 48},
}
QWEN3_NEXT = {
    **GATED_DELTA,
    **EXPERTS,
    "initializer_range": 0.1,  # with larger weights bfloat16 is further off
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    # All of them compute: where the routers choose, bfloat16 now and then chooses another expert.
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 64,
}


PROMPTS = [[5], [7, 8, 9] * 15, list(range(3, 73)), [90] * 33]


def make_worker(name, **changes):
    torch.manual_seed(0)
    settings = {"lr": 1e-2, "max_grad_norm": 1.0, **changes}
    return Worker(worker_config(name, **settings), torch.device("cpu"), num_updates=8)


def answer(engine):
    """The answers to PROMPTS, as a batch with the engine's log-probabilities."""
    answers = play(engine, PROMPTS, max_new_tokens=12)
    assert all(out.version == engine.version for out in answers)
    samples = []
    for i, (prompt, out) in enumerate(zip(PROMPTS, answers, strict=True)):
        mask = [0] * len(prompt) + [1] * len(out.tokens)
        logps = [0.0] * len(prompt) + out.logps
        samples.append(Sample(prompt + out.tokens, mask, logps, [0.0] * len(mask), i, i))
    return collate(samples)


def gap(worker, batch):
    """Mean difference of the engine's log-probabilities and the worker's."""
    difference = (worker.score(batch).logps - batch.engine_logps).abs()
    return (difference * batch.mask).sum().item() / batch.mask.sum().item()


def send_all(engine, worker):
    """As the trainer does after an update."""
    engine.sleep()
    engine.wake()
    engine.load_weights(worker.iter_full_weights(worker.dtype), worker.version)


def verify(engine, worker):
    engine.verify_weights(worker.iter_full_weights(worker.dtype), worker.version)


def check_updates(engine, worker, limit, least_change):
    """The engine has the weights of its files, and those of each update, and computes with them.

    Log-probabilities are the trainer's up to `limit`; the update changes them by `least_change`.
    """
    verify(engine, worker)
    start = answer(engine)
    assert gap(worker, start) < limit
    assert gap(worker, answer(engine)) < limit, "with prompts that it has seen"
    worker.update(make_batch(), policy_loss, with_entropy=True)
    send_all(engine, worker)
    verify(engine, worker)
    assert gap(worker, answer(engine)) < limit
    assert gap(worker, start) > least_change, "the update changes nothing that could be seen"


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
    send_all(engine, worker)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(tmp_path, make_engine, family):
    sizes = {"tied": False, **VLLM_SIZES, **FAMILIES[family]}
    worker = make_worker(make_model(tmp_path / family, family, **sizes))
    engine = make_engine(worker.config.model_name, worker.dtype, max_running_requests=8)
    check_updates(engine, worker, 2e-5, 1e-3)
    of_layers = [
        key
        for key, weight in worker.model.hf.state_dict().items()
        if "layers." in key and weight.is_floating_point()
    ]
    for key in of_layers:
        check_wrong_weight(engine, worker, key)
    verify(engine, worker)


@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float32])
def test_gated_delta_rules(tmp_path, make_engine, file_dtype):
    """vLLM computes them in bfloat16 only. It keeps A_log as the files have it."""
    name = make_model(tmp_path / "model", "qwen3_next", tied=False, **{**VLLM_SIZES, **QWEN3_NEXT})
    AutoModelForCausalLM.from_pretrained(name, dtype=file_dtype).save_pretrained(name)
    with pytest.raises(ValueError, match="gated delta rules, .*: set actor.dtype=bfloat16"):
        make_engine(name)
    worker = make_worker(name, dtype="bfloat16", lr=3e-2)
    engine = make_engine(worker.config.model_name, worker.dtype, max_running_requests=8)
    check_updates(engine, worker, 4e-2, 0.4)
    for key in ("A_log", "dt_bias", "conv1d.weight", "in_proj_ba.weight"):
        check_wrong_weight(engine, worker, f"model.layers.0.linear_attn.{key}")
    verify(engine, worker)


def test_the_text_of_a_model_with_a_tower(tmp_path, make_engine):
    pytest.importorskip("torchvision", reason="vLLM imports it for images")
    sizes = {**VLLM_SIZES, "initializer_range": 0.03}  # or each token repeats itself
    worker = make_worker(save_family("gemma3", tmp_path / "model", **sizes))
    engine = make_engine(worker.config.model_name, worker.dtype, max_running_requests=8)
    check_updates(engine, worker, 2e-5, 1e-3)
    check_wrong_weight(engine, worker, "model.language_model.layers.1.mlp.down_proj.weight")


def test_a_run_trains_experts(tmp_path):
    """All weights are compared in every step. Both ranks evaluate too."""
    sizes = {**VLLM_SIZES, **FAMILIES["qwen3_moe"]}
    name = make_model(tmp_path / "qwen3_moe", "qwen3_moe", tied=False, **sizes)
    torchrun(
        2,
        *["-m", "rl2.trainer.ppo", *letter_run(tmp_path, name)],
        "rollout.engine=vllm",
        "rollout.check_weights=true",
        f"data.test_path={tmp_path / 'train.jsonl'}",
        "trainer.max_steps=3",
        f"trainer.save_dir={tmp_path / 'run'}",
    )
    lines = read_metrics(tmp_path / "run")
    assert lines[-1]["step"] == 3 and "test/reward/mean" in lines[-1]
    assert all((line.get("actor/mismatch_logp_difference") or 0) < 1e-4 for line in lines)
