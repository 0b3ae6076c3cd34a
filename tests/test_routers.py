"""actor.freeze_router: everything but the routers of a mixture of experts is trained."""

import pytest
import torch
from common import GLM4_MOE, LOCAL_EXPERTS, make_model, make_tokenizer
from parity import full_weights, make_batch, policy_loss, worker_config
from transformers import AutoModelForCausalLM

from rl2.model.classes import find_routers
from rl2.worker import Worker

MIXTURES = {"gpt_oss": LOCAL_EXPERTS, "glm4_moe": GLM4_MOE}


def update(name, device, **changes):
    """(the worker after an update, its weights before and after)."""
    worker = Worker(worker_config(name, lr=1e-2, **changes), device, False, 4)
    before = full_weights(worker)
    worker.update(make_batch(), policy_loss, with_entropy=True)
    return worker, before, full_weights(worker)


@pytest.mark.parametrize("family", MIXTURES)
def test_routers_keep_their_weights_and_all_else_moves(tmp_path, device, family):
    name = make_model(tmp_path / "model", family, tied=False, **MIXTURES[family])
    _, before, free = update(name, device)
    moved = {key for key in before if not torch.equal(before[key], free[key])}
    worker, _, frozen = update(name, device, freeze_router=True)
    moved_without_routers = {key for key in before if not torch.equal(before[key], frozen[key])}
    routers = moved - moved_without_routers
    assert len(routers) == (4 if family == "gpt_oss" else 2)  # of two layers; gpt-oss has biases
    assert all(".router." in key or ".gate." in key for key in routers)
    assert moved_without_routers == moved - routers
    # An update of the others is what it was: the router passes its gradient on.
    for key in moved_without_routers:
        torch.testing.assert_close(frozen[key], free[key], rtol=0, atol=1e-4)
    worker.export(str(tmp_path / "export"), make_tokenizer())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for key in routers:
        assert torch.equal(exported[key], before[key])


def test_routers_get_no_adapters(tmp_path, device):
    """Those of Hunyuan are plain linear layers, which would get some."""
    sizes = {"num_experts": 4, "moe_topk": 2, "eod_token_id": 2}
    name = make_model(tmp_path / "model", "hunyuan_v1_moe", **sizes)
    for freezes, num_adapted in ((False, 2), (True, 0)):
        config = worker_config(name, lora_rank=2, freeze_router=freezes)
        routers = find_routers(Worker(config, device, False, 4).model.hf)
        assert sum(hasattr(module, "lora_A") for module in routers) == num_adapted


def test_a_model_without_experts_is_told(tmp_path, device):
    name = make_model(tmp_path / "model")
    for key, value, problem in (
        ("freeze_router", True, "freeze_router=true: .* has no router"),
        ("router_aux_loss_coef", 0.1, "router_aux_loss_coef=0.1: .* has no load-balancing loss"),
        ("routing_replay", True, "routing_replay=true: .* has no router"),
    ):
        with pytest.raises(ValueError, match=problem):
            Worker(worker_config(name, **{key: value}), device, False, 4)
