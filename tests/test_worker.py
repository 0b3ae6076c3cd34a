"""Every layout of the worker against a plain padded Hugging Face forward in this process."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import make_critic, make_model, run, torchrun
from parity import ADAPTED, LAYOUTS, SECTION, make_batch, policy_loss, value_loss
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl2 import optimizer
from rl2.model.token_model import TokenScores
from rl2.optimizer import schedule
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapt(model, drawn):
    """What peft makes of a plain model, with adapters that start at `drawn`, of rank 3 and alpha
    5."""
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=5, target_modules=LINEAR), model)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(f"hf.{key}" in drawn)
        if parameter.requires_grad:
            parameter.data.copy_(drawn[f"hf.{key}"])


def merge(model):
    """The weights of a plain model by name, with what peft says that its adapters add."""
    weights = {
        key.replace(".base_layer.", "."): p
        for key, p in model.named_parameters()
        if ".lora_" not in key
    }
    for key, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            weights[f"{key}.weight"] = weights[f"{key}.weight"] + module.get_delta_weight("default")
    return weights


def reference(name, critic, drawn=None):
    """The same two steps on padded rows of a plain model: scores before them, loss and norm of
    each, weights after."""
    batch = make_batch()
    torch.manual_seed(0)
    cls, more = (
        (AutoModelForSequenceClassification, {"num_labels": 1})
        if critic
        else (AutoModelForCausalLM, {})
    )
    model = cls.from_pretrained(f"{name}-critic" if critic else name, dtype=torch.float32, **more)
    if drawn:
        adapt(model, drawn)
    optimizer = torch.optim.SGD(model.parameters(), lr=SECTION["lr"])
    first, told = None, []
    for _ in range(2):
        hidden = model.base_model(
            batch.inputs, attention_mask=torch.ones_like(batch.inputs)
        ).last_hidden_state
        if critic:
            scores = TokenScores(values=model.score(hidden)[..., 0] * batch.mask)
        else:
            log_p = (model.lm_head(hidden) / 0.9).log_softmax(-1)
            logps = log_p.gather(2, batch.targets[..., None])[..., 0] * batch.mask
            scores = TokenScores(logps=logps, entropy=-(log_p.exp() * log_p).sum(-1) * batch.mask)
        loss, _ = (value_loss if critic else policy_loss)(batch, scores)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SECTION["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        first = first or vars(scores.map(torch.Tensor.detach))
        told.append((loss.item(), norm.item()))
    return first, told, merge(model)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3", False)])
def test_every_layout_equals_one_padded_process(tmp_path, world, family, tied):
    name = make_model(tmp_path / "model", family, tied)
    make_critic(name)
    torchrun(world, "tests/parity.py", name, tmp_path / "out")
    results = torch.load(tmp_path / "out")
    assert len(results) == (8 if world < 4 else 4) * len(LAYOUTS[world]) + 2 * len(ADAPTED[world])
    expected = {critic: reference(name, critic) for critic in (False, True)}
    drawn = {critic: results[critic, "lora", (0, 1)]["drawn"] for critic in (False, True)}
    adapted = {critic: reference(name, critic, drawn[critic]) for critic in (False, True)}
    for (critic, *layout), result in results.items():
        scores, steps, weights = adapted[critic] if layout[0] == "lora" else expected[critic]
        if layout[0] == "lora":
            assert all(
                torch.equal(result["drawn"][key], start) for key, start in drawn[critic].items()
            ), layout
        for key, column in result["scores"].items():
            assert (column is None) == (scores[key] is None)
            if column is not None:
                torch.testing.assert_close(
                    column, scores[key], rtol=0, atol=2e-5, msg=f"{layout} {key}"
                )
        for told, (loss, norm) in zip(result["metrics"], steps, strict=True):
            assert told["loss"] == pytest.approx(loss, abs=1e-5), layout
            assert told["grad_norm"] == pytest.approx(norm, rel=1e-5), layout
        assert result["version"] == 2
        assert result["weights"].keys() == weights.keys()
        for key, weight in result["weights"].items():
            torch.testing.assert_close(
                weight, weights[key].detach(), rtol=0, atol=1e-6, msg=f"{layout} {key}"
            )


def test_schedules_start_above_zero_and_end_where_they_say():
    assert [schedule(n, 10, 0.3, "constant") for n in (0, 1, 2, 3, 9)] == [1 / 3, 2 / 3, 1, 1, 1]
    assert [schedule(n, 10, 0.0, "linear") for n in (0, 5, 10)] == [1, 0.5, 0]
    assert [schedule(n, 10, 0.2, "cosine") for n in (0, 2, 6, 10)] == pytest.approx(
        [0.5, 1, 0.5, 0]
    )


def test_a_gradient_that_is_not_finite_moves_nothing(tmp_path):
    name, batch = make_model(tmp_path / "model"), make_batch()
    worker = Worker(
        SimpleNamespace(**{**SECTION, "model_name": name, "warmup_ratio": 1.0}),
        init_distributed(),
        False,
        4,
    )
    try:
        before = {key: weight.clone() for key, weight in worker.iter_full_weights(torch.float32)}

        def broken(part, scores):
            loss, metrics = policy_loss(part, scores)
            return loss * float("inf"), metrics

        told = worker.update(batch, broken, with_entropy=True)
        assert told.skipped and worker.version == 0
        assert all(
            torch.equal(weight, before[key])
            for key, weight in worker.iter_full_weights(torch.float32)
        )
        told = worker.update(batch, policy_loss, with_entropy=True)
        assert not told.skipped and worker.version == 1
        assert told.lr == SECTION["lr"] / 4  # the schedule had not moved either
        assert any(
            not torch.equal(weight, before[key])
            for key, weight in worker.iter_full_weights(torch.float32)
        )
    finally:
        dist.destroy_process_group()


def test_a_step_in_parts_is_the_same_step(tmp_path, monkeypatch):
    """offload_optimizer: AdamW with a few parameters at a time, an optimizer that was saved in
    between, to the bit."""
    name, batch, parts, found = make_model(tmp_path / "model"), make_batch(), [], []
    monkeypatch.setattr(optimizer, "DEVICE_STATE_BYTES", 20_000)
    move_states = optimizer._move_states

    def count_and_move(states, device):
        parts.append(len(states))
        move_states(states, device)

    monkeypatch.setattr(optimizer, "_move_states", count_and_move)
    device = init_distributed()
    try:
        for off in (False, True):
            settings = {
                "model_name": name,
                "offload_optimizer": off,
                "lr": 0.01,
                "weight_decay": 0.1,
            }
            worker = Worker(SimpleNamespace(**{**SECTION, **settings}), device, False, 4)
            told = [worker.update(batch, policy_loss, with_entropy=True) for _ in range(2)]
            worker.load_state_dict(worker.state_dict())
            told += [worker.update(batch, policy_loss, with_entropy=True) for _ in range(2)]
            assert all(parameter.grad is None for parameter in worker.model.parameters())
            found.append((told, dict(worker.iter_full_weights(torch.float32))))
    finally:
        dist.destroy_process_group()
    num = len(list(worker.model.parameters()))
    assert len(parts) > 4 * 2 * 3 and sum(parts) == 4 * 2 * num, "each parameter once in, once out"
    (whole, weights), (in_parts, others) = found
    assert whole == in_parts and all(torch.equal(weights[key], others[key]) for key in weights)


def test_a_new_value_head_starts_at_zero(tmp_path):
    section = SimpleNamespace(**{**SECTION, "model_name": make_model(tmp_path / "model")})
    try:
        values = Worker(section, init_distributed(), True, 4).infer(make_batch()).values
        assert values.abs().max() == 0
    finally:
        dist.destroy_process_group()


def test_values_computed_in_bf16_are_not_rounded_to_it(tmp_path):
    """Rewards of like replies would tie: from 1 to 2 bf16 has 128 numbers."""
    name, batch = make_critic(make_model(tmp_path / "model")), make_batch()
    section = SimpleNamespace(**{**SECTION, "model_name": name, "dtype": "bfloat16"})
    try:
        values = Worker(section, init_distributed(), True, 4).infer(batch).values[batch.mask > 0]
        assert (values != values.bfloat16()).float().mean() > 0.9
    finally:
        dist.destroy_process_group()


def test_a_process_may_end_right_behind_a_collective():
    """Without init's pause this aborts every time: gloo's threads hold the last reference to the
    tensors."""
    script = (
        "import torch, torch.distributed as dist\n"
        "from rl2.parallel.mesh import init_distributed\ninit_distributed()\n"
    )
    script += "for _ in range(50):\n    dist.all_reduce(torch.ones(100_000), async_op=True)"
    run("-c", script)


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="threads are counted in Linux's /proc"
)
def test_one_process_keeps_its_threads_to_itself():
    """A second team of OpenMP threads, that of a gloo thread which copies, costs a single process
    half its speed."""
    script = (
        "import torch, os\n"
        "from rl2.parallel.mesh import all_gather_objects, init_distributed\ninit_distributed()\n"
    )
    script += (
        "torch.ones(10**6) + 1\nbefore = set(os.listdir('/proc/self/task'))\nvalue = b'x' * 10**6\n"
    )
    script += (
        "assert all_gather_objects(value) == [value]\n"
        "assert set(os.listdir('/proc/self/task')) <= before"
    )
    run("-c", script, env={"OMP_NUM_THREADS": "2"})
