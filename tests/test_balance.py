"""actor.router_aux_loss_coef: the load-balancing loss of a mixture of experts.

test_routing.py tests its layouts.
"""

import sys

import pytest
import torch
from common import MIXTURES, make_model
from parity import (
    SMALL_BUDGET,
    assert_equal_gradients,
    gradients_by_sgd,
    make_batch,
    worker_config,
)
from transformers import AutoModelForCausalLM

from rl2.batch import scored_spans
from rl2.model.moe import FrozenRouters
from rl2.worker import Worker

COEFFICIENT = 0.1


def make_worker(name, **changes):
    changes = {"router_aux_loss_coef": COEFFICIENT, "max_grad_norm": float("inf"), **changes}
    return Worker(worker_config(name, **changes), torch.device("cpu"), num_updates=4)


def of_transformers(name):
    """The gradient of the loss of transformers over the tokens that are trained, and its value.

    The value is divided by the choices of a token.
    """
    hf = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    batch = make_batch()
    logits, mask = [], []
    for row, (_, end) in enumerate(scored_spans(batch)):
        output = hf(batch.inputs[row : row + 1, :end], output_router_logits=True)
        logits.append(output.router_logits)
        mask.append(batch.mask[row, :end])
    function = sys.modules[type(hf).__module__].load_balancing_loss_func
    layers = tuple(map(torch.cat, zip(*logits, strict=True)))
    value = function(layers, layers[0].shape[-1], hf.num_experts_per_tok, torch.cat(mask))
    (COEFFICIENT * value).backward()
    gradients = {key: p.grad for key, p in hf.named_parameters() if p.grad is not None}
    return gradients, value.item() / hf.num_experts_per_tok


@pytest.mark.parametrize("family", MIXTURES)
def test_gradient_and_value_are_those_of_transformers(tmp_path, device, family):
    name = make_model(tmp_path / "model", family, tied=False, **MIXTURES[family])
    expected, value = of_transformers(name)
    routers = [g for key, g in expected.items() if "gate" in key or "rout" in key]
    assert max(gradient.abs().max() for gradient in routers) > 1e-4
    worker = make_worker(name, max_length_per_device=SMALL_BUDGET, gradient_checkpointing=True)
    gradients, result = gradients_by_sgd(
        worker, make_batch(), lambda batch, scores: ((scores.logps * 0).sum(), {})
    )
    assert_equal_gradients(gradients, expected, atol=1e-6)
    assert result.loss == 0
    assert result.reported["load_balance"] == pytest.approx(value, rel=1e-4)


def test_the_config_of_a_model_may_ask_for_the_loss(tmp_path, device, capsys):
    asking = {**MIXTURES["mixtral"], "output_router_logits": True, "router_aux_loss_coef": 0.25}
    name = make_model(tmp_path / "model", "mixtral", tied=False, **asking)
    [balance] = make_worker(name, router_aux_loss_coef=None).model.attachments
    assert balance.coefficient == 0.25
    assert "0.25" in capsys.readouterr().out
    assert not make_worker(name, router_aux_loss_coef=0.0).model.attachments
    frozen = make_worker(name, router_aux_loss_coef=None, freeze_router=True)
    assert [type(part) for part in frozen.model.attachments] == [FrozenRouters]
