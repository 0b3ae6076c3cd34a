"""Mixtures of experts: replayed routing, the load-balancing loss, routers that are frozen.

With actor.routing_replay the trainer computes with the experts that the engine chose.
"""

import asyncio
import sys
from base64 import b64encode
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import (
    EXPERTS,
    GATED_DELTA,
    GLM4_MOE,
    LETTER_ENV,
    LOCAL_EXPERTS,
    MIXTURES,
    launch,
    launch_runs,
    letter_run,
    make_model,
    make_tokenizer,
    read_metrics,
)
from engine_contract import check_routing, chosen_by_transformers
from parity import (
    MAX_GRAD_NORM,
    SMALL_BUDGET,
    assert_equal_gradients,
    full_weights,
    gradients_by_sgd,
    make_batch,
    policy_loss,
    save_layouts,
    worker_config,
)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl2.batch import scored_spans
from rl2.config.rules import wrong_engine
from rl2.config.schema import PPOConfig
from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.local import LocalEngine
from rl2.engine.sglang import SGLangEngine
from rl2.model.classes import empty_language_model, find_routers
from rl2.model.moe import FrozenRouters, find_logit_routers, find_router_layers
from rl2.worker import Worker

NUM_LAYERS, NUM_EXPERTS, NUM_CHOICES = 2, 4, 2
FAMILIES = {
    **MIXTURES,
    "glm4_moe": {  # groups of experts first, and a layer without experts
        **GLM4_MOE,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
    "qwen3_next": {**GATED_DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
}
MANY_MICRO_BATCHES = {"max_length_per_device": SMALL_BUDGET, "gradient_checkpointing": True}
LAYOUTS = {
    "many micro-batches": MANY_MICRO_BATCHES,
    "unshared prompts": {"share_prompts": False},
    "copies": {"fsdp_size": 1},
    "sp": {"sp_size": 2, "max_length_per_device": SMALL_BUDGET},
    "adapters": {"lora_rank": 2},
}


@pytest.mark.parametrize(
    "family, exact", [*((family, False) for family in FAMILIES), ("qwen3_moe", True)]
)
def test_the_engine_tells_what_the_routers_choose(tmp_path, family, exact):
    name = make_model(tmp_path / "model", family, tied=False, **FAMILIES[family])
    options = {"max_running_requests": 2, "exact": exact, "with_experts": True}
    engine = LocalEngine(EngineSettings(name, torch.float32, torch.device("cpu"), **options))
    check_routing(engine, name)
    engine.close()


def make_routed_batch():
    """Rows with experts that depend on token and position, so equal prompts have equal ones."""
    batch = make_batch()
    generator = torch.Generator().manual_seed(3)
    shape = (98, 7, NUM_LAYERS, NUM_EXPERTS)
    table = torch.rand(shape, generator=generator).argsort(-1)[..., :NUM_CHOICES].to(torch.int16)
    rows = []
    for row, (_, end) in enumerate(scored_spans(batch)):
        tokens = batch.inputs[row, :end].long()
        rows.append(table[tokens, torch.arange(end) % 7])
    batch.experts = rows
    return batch


def make_worker(name, **changes):
    config = worker_config(name, **{"max_grad_norm": float("inf"), **changes})
    return Worker(config, torch.device("cpu"), num_updates=4)


def loss_of(batch, logps):
    return -(logps * batch.advantages * batch.token_weights).sum()


def update(name, **changes):
    """(log-probabilities before an SGD update, the gradient by name, what the update reports)."""
    worker = make_worker(name, routing_replay=True, **changes)
    batch = make_routed_batch()
    logps = worker.score(batch).logps
    gradients, result = gradients_by_sgd(
        worker, batch, lambda rows, scores: (loss_of(rows, scores.logps), {})
    )
    return logps, gradients, result.reported


def route_by_hand(family, router, experts, hidden):
    """What the router gives for these choices, by its family's formula."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logits = F.linear(hidden, router.weight, getattr(router, "bias", None))
    if family == "gpt_oss":
        weights = logits.gather(-1, experts).softmax(-1)
    else:
        weights = logits.softmax(-1).gather(-1, experts)
        if family == "mixtral" or router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, experts


def update_by_hand(name, family):
    """As `update`, but for the report: each row alone, with routers that are told their choices."""
    hf = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    batch = make_routed_batch()
    logps = torch.zeros(batch.mask.shape)
    for row, experts in enumerate(batch.experts):
        for index, (router, _) in enumerate(find_logit_routers(hf)):
            chosen = experts[:, index].long()
            router.forward = lambda hidden, router=router, chosen=chosen: route_by_hand(
                family, router, chosen, hidden
            )
        end = len(experts)
        log_p = hf(batch.inputs[row : row + 1, :end]).logits[0].log_softmax(-1)
        logps[row, :end] = log_p.gather(1, batch.targets[row, :end, None].long())[:, 0]
    logps = logps * batch.mask
    loss_of(batch, logps).backward()
    return logps.detach(), {key: p.grad for key, p in hf.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", MIXTURES)
def test_scores_and_gradients_are_those_of_the_given_experts(tmp_path, device, family):
    name = make_model(tmp_path / "model", family, tied=False, **MIXTURES[family])
    wanted_logps, wanted = update_by_hand(name, family)
    routers = [g for key, g in wanted.items() if "gate.weight" in key or "router" in key]
    assert max(gradient.abs().max() for gradient in routers) > 1e-3
    logps, gradients, _ = update(name, **MANY_MICRO_BATCHES)
    torch.testing.assert_close(logps, wanted_logps, rtol=0, atol=1e-4)
    assert_equal_gradients(gradients, wanted, atol=2e-5)
    own = make_worker(name, routing_replay=True).score(make_batch()).logps
    assert (own - wanted_logps).abs().max() > 1e-2


def balanced_update(name, **changes):
    """As `update`, with the load-balancing loss, whose gradient is as large as the other."""
    return update(name, router_aux_loss_coef=1.0, **changes)


if __name__ == "__main__":  # a process of the test below
    save_layouts(balanced_update, LAYOUTS, *sys.argv[1:])


def test_every_layout_of_two_processes_equals_one_process(tmp_path, device):
    name = make_model(tmp_path / "model", "mixtral", tied=False, **MIXTURES["mixtral"])
    launch(2, __file__, name, tmp_path / "results")
    expected = {rank: balanced_update(name, lora_rank=rank) for rank in (0, 2)}
    for layout, (logps, gradients, reported) in torch.load(tmp_path / "results").items():
        wanted_logps, wanted, wanted_report = expected[2 if layout == "adapters" else 0]
        torch.testing.assert_close(logps, wanted_logps, rtol=0, atol=1e-4)
        assert_equal_gradients(gradients, wanted, atol=2e-5)
        assert reported == pytest.approx(wanted_report, rel=1e-5)


def test_the_reference_chooses_for_itself(tmp_path, device):
    name = make_model(tmp_path / "model", "mixtral", tied=False, **MIXTURES["mixtral"])
    settings = {"routing_replay": True, "lora_rank": 2}
    worker = make_worker(name, **settings)
    batch = make_routed_batch()
    replayed = worker.score(batch).logps
    own = worker.reference().score(batch).logps
    assert torch.equal(own, make_worker(name, **settings).score(make_batch()).logps)
    assert (own - replayed).abs().max() > 1e-2
    assert torch.equal(worker.score(batch).logps, replayed)


TURNS_ENV = """
def interact(messages):
    return [{"role": "user", "content": "more"}]
"""


def test_a_run_keeps_the_experts_of_all_turns_and_trains_with_them(tmp_path):
    """Also a run on the saved rollouts: the engine of step 1 had the weights that it begins with.

    With rollout.exact the first policy chooses what the engine chose, so that replay only changes
    what the second update of a rollout computes.
    """
    name = make_model(tmp_path / "tiny", "qwen3_moe", **MIXTURES["qwen3_moe"])
    keys = letter_run(tmp_path, name) + [
        "rollout.max_turns=2",
        "actor.update_per_rollout=2",
        "trainer.save_tokens=true",
        "trainer.max_steps=2",
    ]
    (tmp_path / "env.py").write_text(LETTER_ENV + TURNS_ENV)
    settings = {
        "replayed": ["actor.routing_replay=true"],
        "plain": [],
        "again": ["actor.routing_replay=true", f"trainer.rollouts_from={tmp_path / 'replayed'}"],
    }
    folders = {key: tmp_path / key for key in settings}
    commands = [
        ["ppo", *keys, *own, f"trainer.save_dir={folders[key]}"] for key, own in settings.items()
    ]
    launch_runs(1, commands)
    replayed, plain, again = (read_metrics(folder)[0] for folder in folders.values())
    assert replayed["reward/mean"] == plain["reward/mean"]
    assert replayed["actor/loss"] != plain["actor/loss"]  # the mean of two updates
    assert replayed["actor/loss"] == again["actor/loss"]
    tensors = load_file(tmp_path / "replayed/rollouts/train/step_1.safetensors")
    lengths, counts = tensors["length"].tolist(), tensors["expert_tokens"].tolist()
    assert tensors["experts"].shape == (sum(counts), NUM_LAYERS, NUM_CHOICES)
    for mask, count in zip(tensors["mask"].split(lengths), counts, strict=True):
        assert count >= mask.nonzero().max()  # all tokens that predict a sampled one
    rows = zip(tensors["tokens"].split(lengths), tensors["experts"].split(counts), strict=True)
    for tokens, experts in list(rows)[:3]:
        expected = chosen_by_transformers(name, tokens[: len(experts) + 1].tolist())
        assert torch.equal(experts.sort(-1).values.long(), expected.sort(-1).values)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_engines_that_tell_no_experts_are_refused_before_they_start(engine):
    """On a CPU SGLang 0.5.23 fails when it is asked for them: it pins memory for a GPU."""
    config = PPOConfig()
    config.rollout.engine = engine
    for config.actor.routing_replay in (False, True):
        broken = [key for key, _ in wrong_engine(config)]
        assert ("actor.routing_replay" in broken) == config.actor.routing_replay


def test_of_all_layers_that_sglang_tells_of_those_with_a_router_count(tmp_path):
    """They are the last two of three. On a CPU the real one cannot be asked."""
    name = make_model(tmp_path / "model", "glm4_moe", tied=False, **FAMILIES["glm4_moe"])
    engine = object.__new__(SGLangEngine)
    engine.vocabulary, engine.max_length, engine.version = 99, 99, 0
    engine.num_aborts, engine.num_requests = 0, 0
    engine.loop = asyncio.new_event_loop()
    engine.choices_shape = (-1, 3, 2)
    model = empty_language_model(AutoConfig.from_pretrained(name))
    engine.router_layers = find_router_layers(name, model)

    async def answer(input_ids, routed_experts_start_len=0, **options):
        """One token. The two experts of token t in layer l are 10 l + t and one more."""
        tokens = np.arange(routed_experts_start_len, len(input_ids))[:, None, None]
        experts = tokens + 10 * np.arange(3)[:, None] + np.arange(2)
        told = b64encode(experts.astype(np.int32).tobytes()).decode()
        meta = {"output_token_logprobs": [(-0.5, 1, None)], "routed_experts": told}
        return {"meta_info": meta | {"finish_reason": {"type": "length"}}}

    engine.engine = SimpleNamespace(async_generate=answer)

    def ask(**params):
        params = SamplingParams(max_new_tokens=1, **params)
        return engine.loop.run_until_complete(engine.generate([3, 4, 5], params, (0,)))

    assert ask(experts_from=1).experts.tolist() == [[[11, 12], [21, 22]], [[12, 13], [22, 23]]]
    assert ask().experts is None
    engine.loop.close()


def balance_of_transformers(name):
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
    (0.1 * value).backward()
    gradients = {key: p.grad for key, p in hf.named_parameters() if p.grad is not None}
    return gradients, value.item() / hf.num_experts_per_tok


@pytest.mark.parametrize("family", MIXTURES)
def test_gradient_and_value_of_the_balance_are_those_of_transformers(tmp_path, device, family):
    name = make_model(tmp_path / "model", family, tied=False, **MIXTURES[family])
    expected, value = balance_of_transformers(name)
    routers = [g for key, g in expected.items() if "gate" in key or "rout" in key]
    assert max(gradient.abs().max() for gradient in routers) > 1e-4
    worker = make_worker(name, router_aux_loss_coef=0.1, **MANY_MICRO_BATCHES)
    gradients, result = gradients_by_sgd(
        worker, make_batch(), lambda batch, scores: ((scores.logps * 0).sum(), {})
    )
    assert_equal_gradients(gradients, expected, atol=1e-6)
    assert result.loss == 0
    assert result.reported["load_balance"] == pytest.approx(value, rel=1e-4)


def test_the_config_of_a_model_may_ask_for_the_balance(tmp_path, device, capsys):
    asking = {**MIXTURES["mixtral"], "output_router_logits": True, "router_aux_loss_coef": 0.25}
    name = make_model(tmp_path / "model", "mixtral", tied=False, **asking)
    [balance] = make_worker(name).model.attachments
    assert balance.coefficient == 0.25
    assert "0.25" in capsys.readouterr().out
    assert not make_worker(name, router_aux_loss_coef=0.0).model.attachments
    frozen = make_worker(name, freeze_router=True)
    assert [type(part) for part in frozen.model.attachments] == [FrozenRouters]


def usual_update(name, **changes):
    """(the worker after an update, its weights before and after)."""
    worker = make_worker(name, lr=1e-2, max_grad_norm=MAX_GRAD_NORM, **changes)
    before = full_weights(worker)
    worker.update(make_batch(), policy_loss, with_entropy=True)
    return worker, before, full_weights(worker)


@pytest.mark.parametrize("family, sizes", [("gpt_oss", LOCAL_EXPERTS), ("glm4_moe", GLM4_MOE)])
def test_routers_keep_their_weights_and_all_else_moves(tmp_path, device, family, sizes):
    name = make_model(tmp_path / "model", family, tied=False, **sizes)
    _, before, free = usual_update(name)
    moved = {key for key in before if not torch.equal(before[key], free[key])}
    worker, _, frozen = usual_update(name, freeze_router=True)
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
        routers = find_routers(make_worker(name, lora_rank=2, freeze_router=freezes).model.hf)
        assert sum(hasattr(module, "lora_A") for module in routers) == num_adapted


def test_a_model_without_experts_is_told(tmp_path, device):
    name = make_model(tmp_path / "model")
    for key, value, problem in (
        ("freeze_router", True, "freeze_router=true: .* has no router"),
        ("router_aux_loss_coef", 0.1, "router_aux_loss_coef=0.1: .* has no load-balancing loss"),
        ("routing_replay", True, "routing_replay=true: .* has no router"),
    ):
        with pytest.raises(ValueError, match=problem):
            make_worker(name, **{key: value})
