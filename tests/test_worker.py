"""Compares every layout of the worker with a plain padded Hugging Face forward.

Those of adapters are compared with one process, which test_lora.py compares with peft.
"""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from unittest import mock

import pytest
import torch
from common import WINDOWED, launch, make_critic, make_model
from parity import (
    LEARNING_RATE,
    assert_equal_steps,
    full_weights,
    layouts_of,
    make_batch,
    make_worker,
    plain_scores,
    plain_steps,
    policy_loss,
    two_steps,
    value_loss,
    worker_config,
)
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl2.attention import ring
from rl2.config.schema import ActorConfig
from rl2.model.token_model import TokenScores
from rl2.optimizer import AdamW, hidden_matrices, orthogonalise, schedule
from rl2.parallel import offload
from rl2.parallel.recompute import recompute
from rl2.run.checkpoints import export_optimizer
from rl2.trainer.ppo import ratio_is_too_high
from rl2.worker import Worker


def reference(name, critic):
    """The two updates of a plain model."""
    if not critic:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        return plain_steps(model, partial(plain_scores, temperature=0.9), policy_loss)
    model = AutoModelForSequenceClassification.from_pretrained(
        f"{name}-critic", dtype=torch.float32, num_labels=1
    )

    def score(model, batch):
        hidden = model.base_model(batch.inputs).last_hidden_state
        return TokenScores(values=model.score(hidden)[..., 0] * batch.mask)

    return plain_steps(model, score, value_loss)


@pytest.mark.parametrize(
    ("world", "family"),
    [
        (1, "llama"),
        (2, "llama"),
        (2, "qwen3"),
        (3, "qwen3"),
        pytest.param(4, "llama", marks=pytest.mark.nightly),
        pytest.param(4, "qwen3", marks=pytest.mark.nightly),
    ],
)
def test_every_layout_equals_one_padded_process(tmp_path, world, family, device):
    """Qwen3 has a full and a sliding layer here, and a head of its own."""
    windows = WINDOWED["qwen2"] if family == "qwen3" else {}
    name = make_model(tmp_path / "model", family, tied=family == "llama", **windows)
    make_critic(name)
    one_process = partial(two_steps, name, device=device, batch=make_batch())
    layouts = layouts_of(family, world)
    if world == 1:
        results = [one_process(**layout) for layout in layouts]
    else:
        launch(world, "tests/parity.py", name, tmp_path / "out", family)
        results = [*torch.load(tmp_path / "out").values()]
    expected = {}
    for layout, result in zip(layouts, results, strict=True):
        critic, is_adapted = kind = layout["critic"], "lora_rank" in layout
        if kind not in expected:
            plain = {**layout, "fsdp_size": 0, "sp_size": 1, "tp_size": 1}
            expected[kind] = one_process(**plain) if is_adapted else reference(name, critic)
        assert_equal_steps(result, expected[kind], layout, 2e-5, 1e-5)
        assert result["version"] == 2
        num_sums = result["sums_over_copies"]
        if is_adapted:
            for key, start in expected[kind]["initial_adapters"].items():
                assert torch.equal(result["initial_adapters"][key], start), layout
            assert num_sums <= 2 * result["sharded_modules"], layout
        else:
            # Copies of the model sum each gradient once an update, not once a micro-batch.
            has_copies = 0 < layout["fsdp_size"] < world // layout["tp_size"]
            assert num_sums == has_copies * 2 * result["sharded_modules"], layout


def test_schedules_start_above_zero_and_end_where_they_say():
    assert [schedule(n, 10, 0.3, "constant") for n in (0, 1, 2, 3, 9)] == [1 / 3, 2 / 3, 1, 1, 1]
    assert [schedule(n, 10, 0.0, "linear") for n in (0, 5, 10)] == [1, 0.5, 0]
    assert [schedule(n, 10, 0.2, "cosine") for n in (0, 2, 6, 10)] == pytest.approx(
        [0.5, 1, 0.5, 0]
    )
    # A run that goes on with fewer updates than it has made: the rate stays where it ended.
    for kind, last in (("linear", 0), ("cosine", 0), ("constant", 1)):
        assert schedule(17, 10, 0.2, kind) == last
    # A floor of 0.2: halfway between 1 and 0.2 is 0.6, and the warm-up stays as it is.
    rates = [schedule(n, 10, 0.0, "linear", 0.2) for n in (0, 5, 10, 17)]
    assert rates == pytest.approx([1, 0.6, 0.2, 0.2])
    assert schedule(6, 10, 0.2, "cosine", 0.2) == pytest.approx(0.6)
    assert schedule(0, 10, 0.2, "linear", 0.2) == 0.5


@pytest.fixture(scope="module")
def name(tmp_path_factory):
    """The name of a model that no test changes."""
    return make_model(tmp_path_factory.mktemp("models") / "model")


def test_the_state_of_another_optimizer_is_refused(name, tmp_path, device):
    worker = Worker(worker_config(name), device, False, 8)
    export_optimizer(worker.optimizer, str(tmp_path))
    other = worker_config(name, optimizer="muon", optimizer_dir=str(tmp_path))
    with pytest.raises(ValueError, match="(?s)^optimizer_dir=.*momentum_buffer.*leave the key out"):
        Worker(other, device, False, 8)


@pytest.mark.parametrize("offload", [False, True])
def test_muon_gives_the_updates_of_torchs_muon_and_adamw(name, device, monkeypatch, offload):
    """Of one process, in float32; a checkpoint between two steps changes none."""
    config = worker_config(
        name, optimizer="muon", weight_decay=0.1, betas=[0.5, 0.7], offload_optimizer=offload
    )
    worker = Worker(config, device, False, 8)
    peers = {n: p.full_tensor().detach().clone() for n, p in worker.trained_parameters.items()}
    matrices = [peers[n] for n in peers if n.endswith("proj.weight")]
    others = [peers[n] for n in peers if not n.endswith("proj.weight")]
    assert len(matrices) == 2 * 7 and len(others) == len(peers) - 14 > 0
    optimizers = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.1, betas=(0.5, 0.7)),
    ]
    for _ in range(3):
        for key, parameter in worker.trained_parameters.items():
            peers[key].grad = torch.randn_like(peers[key])
            parameter.grad = distribute_tensor(
                peers[key].grad, parameter.device_mesh, parameter.placements
            )
        worker.optimizer.step(0.01)
        with monkeypatch.context() as patch:  # torch's Muon is in bfloat16
            patch.setattr(torch, "bfloat16", torch.float32)
            patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
            for optimizer in optimizers:
                optimizer.step()
        state = {key: entry.clone() for key, entry in worker.optimizer.state_dict().items()}
        for shard in worker.optimizer.momentum.values():
            shard.zero_()
        worker.optimizer.load_state_dict(state)
    for key, parameter in worker.trained_parameters.items():
        torch.testing.assert_close(parameter.full_tensor(), peers[key], rtol=0, atol=1e-5)


def test_muon_takes_the_matrices_of_the_layers(tmp_path):
    """Not embeddings, heads, vectors and convolutions; stacks of experts are many matrices."""
    hf = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model", tied=False))
    layer = hf.model.layers[0]
    layer.experts = torch.nn.Parameter(torch.randn(3, 4, 6))
    layer.taps = torch.nn.Parameter(torch.randn(8, 1, 4))
    names = hidden_matrices(hf)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "0",  # the experts, of layer 0
    }
    stacked = orthogonalise(layer.experts.detach())
    for matrix, expert in zip(stacked, layer.experts.detach(), strict=True):
        torch.testing.assert_close(matrix, orthogonalise(expert))
        assert torch.linalg.svdvals(matrix).sub(1).abs().max() < 0.35


def test_muon_moves_no_weight_by_more_than_its_decay_without_a_gradient(name, device):
    """An adapter's A has no gradient while B is 0: 0 / 0 must not become NaN."""
    config = worker_config(name, optimizer="muon", lora_rank=2)
    worker = Worker(config, device, False, 8)
    before = full_weights(worker)
    result = worker.update(make_batch(), policy_loss, with_entropy=True)
    weights = full_weights(worker)
    assert not result.skipped and all(weight.isfinite().all() for weight in weights.values())
    assert any(not weights[key].equal(before[key]) for key in weights)


def test_so_many_layers_are_recomputed_and_the_gradient_stays(name, device):
    """The first ones. True means all of them, False none. Their attention is not computed again."""
    expected = None
    num_attends = 0
    settings = [(False, [1, 1]), (0, [1, 1]), (1, [2, 1]), (7, [2, 2]), (True, [2, 2])]
    for setting, runs in settings:
        config = worker_config(name, gradient_checkpointing=setting)
        worker = Worker(config, device, False, 4)
        layers = worker.model.hf.base_model.layers
        calls = [mock.Mock(return_value=None) for _ in layers]
        for layer, call in zip(layers, calls, strict=True):
            layer.mlp.register_forward_pre_hook(call)
        with mock.patch.object(ring, "forward_block", wraps=ring.forward_block) as attend:
            worker.update(make_batch(), policy_loss, with_entropy=True)
        assert [call.call_count for call in calls] == runs
        num_attends = num_attends or attend.call_count
        assert attend.call_count == num_attends
        weights = full_weights(worker)
        expected = expected or weights
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


def test_what_a_layer_leaves_for_later_ones_has_a_gradient():
    """As the keys of Gemma 4, which some of its layers share."""
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    num_runs = 0

    def first(x, shared):
        nonlocal num_runs
        num_runs += 1
        shared["keys"] = (x * weight).exp()
        return (x * weight).sin().cos()

    def second(x, shared):
        return (x * shared["keys"]).sin()

    gradients = []
    for is_again in (False, True):
        layers = [first, second]
        if is_again:
            layers = [partial(recompute, layer, lambda: (nullcontext(),) * 2) for layer in layers]
        x = out = torch.tensor([0.5, 0.7], requires_grad=True)
        shared: dict = {}
        for layer in layers:
            out = layer(out, shared=shared)
        gradients.append(torch.autograd.grad(out.sum(), [x, weight]))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    assert num_runs == 3


@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [
        ("llama", "float32", {"gradient_checkpointing": True}),
        ("llama", "bfloat16", {"gradient_checkpointing": 1}),
        ("llama", "bfloat16", {"lora_rank": 2}),
        ("olmo", "bfloat16", {}),  # its rotary angles are in fp32
    ],
)
def test_one_process_has_the_bits_of_fsdp(tmp_path, device, family, dtype, changes):
    name = make_model(tmp_path, family)
    settings = {"dtype": dtype, "max_length_per_device": 60, **changes}
    batch = make_batch()
    results = []
    for keep_gathered in (True, False):
        worker = make_worker(name, device, keep_gathered=keep_gathered, **settings)
        updates = [worker.update(batch, policy_loss, with_entropy=True).to_log() for _ in "12"]
        results.append((updates, worker.score(batch).logps, full_weights(worker)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_an_update_that_is_skipped_or_trains_no_token_moves_nothing(name, device):
    """It is skipped because its gradient is not finite, or its loss says so.

    AdamW would decay the weights, and move them by its momentum.
    """
    batch = make_batch()
    config = worker_config(name, min_lr_ratio=0.5, scheduler="linear", weight_decay=0.1)
    worker = Worker(config, device, False, 4)
    before = full_weights(worker)

    def loss_with_ratio(rows, scores, factor):
        """The ratio is 3 at every token, so its mean by any weights is 3."""
        loss, metrics = policy_loss(rows, scores)
        return factor * loss, {**metrics, "ratio": (3 * rows.token_weights).sum()}

    def update(limit, factor=1.0):
        skip = partial(ratio_is_too_high, ActorConfig(skip_threshold=limit), batch)
        loss = partial(loss_with_ratio, factor=factor)
        return worker.update(batch, loss, with_entropy=True, skip=skip)

    assert update(None, float("inf")).skipped
    result = update(2.9)
    assert result.skipped and worker.version == 0 and result.grad_norm > 0
    after = full_weights(worker)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert not update(3.1).skipped and not update(None).skipped
    assert worker.version == 2
    after = full_weights(worker)
    assert any(not torch.equal(after[key], before[key]) for key in before)
    # After 2 of 4 updates the linear schedule is halfway between 1 and its floor of 0.5: the
    # skipped ones do not count.
    assert update(None).lr == pytest.approx(0.75 * LEARNING_RATE)
    before = full_weights(worker)
    batch.mask = torch.zeros_like(batch.mask)
    batch.token_weights = torch.zeros_like(batch.token_weights)
    assert not update(None).skipped
    after = full_weights(worker)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert worker.version == 4, "the schedule counts this update"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_takes_the_weights_of_the_actor_and_keeps_them(name, device, dtype):
    """Rounded to its own dtype; its checkpoint holds them."""
    batch = make_batch()
    worker = Worker(worker_config(name, lr=0.1, dtype=dtype), device, False, 4)
    reference = worker.reference()
    start = full_weights(reference)
    worker.update(batch, policy_loss, with_entropy=True)
    reference.copy_weights(worker)
    taken = full_weights(reference)
    rounded = dict(worker.iter_full_weights(reference.dtype))
    assert all(torch.equal(taken[key], rounded[key].float()) for key in taken)
    assert any(not torch.equal(taken[key], start[key]) for key in taken)
    state = deepcopy(reference.state_dict())
    worker.update(batch, policy_loss, with_entropy=True)  # moves the actor alone
    restored = worker.reference()
    restored.load_state_dict(state)
    kept = [full_weights(reference), full_weights(restored)]
    assert all(torch.equal(weights[key], taken[key]) for weights in kept for key in taken)


def test_a_step_in_parts_is_the_same_step(name, monkeypatch, device):
    """With offload_optimizer, AdamW updates a piece at a time and gives the same bits.

    The largest weights are cut. The state is saved and restored between the updates.
    """
    batch = make_batch()
    limit = 1024  # elements of a piece; two pieces of two moments in fp32 are on the device
    monkeypatch.setattr(offload, "VISITING_BYTES", limit * 2 * 2 * 4)
    updates, weights = {}, {}
    change = mock.Mock(wraps=AdamW._change)
    monkeypatch.setattr(AdamW, "_change", lambda *arguments: change(*arguments))
    for offload_optimizer in (False, True):
        change.reset_mock()
        config = worker_config(name, offload_optimizer=offload_optimizer, lr=0.01, weight_decay=0.1)
        worker = Worker(config, device, False, 4)
        results = [worker.update(batch, policy_loss, with_entropy=True) for _ in range(2)]
        worker.load_state_dict(worker.state_dict())
        results += [worker.update(batch, policy_loss, with_entropy=True) for _ in range(2)]
        assert all(parameter.grad is None for parameter in worker.model.parameters())
        updates[offload_optimizer] = results
        weights[offload_optimizer] = full_weights(worker)
    largest = max(parameter.numel() for parameter in worker.model.parameters())
    pieces = [shard.numel() for call in change.call_args_list for shard in call.args[2]]
    assert largest > limit == max(pieces), "the largest weights are cut"
    assert updates[False] == updates[True]
    assert all(torch.equal(weights[False][key], weights[True][key]) for key in weights[False])


def test_a_new_value_head_starts_at_zero(name, device):
    values = Worker(worker_config(name), device, True, 4).score(make_batch()).values
    assert values.abs().max() == 0


def test_values_computed_in_bf16_are_not_rounded_to_it(name, device):
    """bf16 has only 128 numbers from 1 to 2, so rewards of similar replies would be equal."""
    batch = make_batch()
    worker = Worker(worker_config(make_critic(name), dtype="bfloat16"), device, True, 4)
    values = worker.score(batch).values[batch.mask > 0]
    assert (values != values.bfloat16()).float().mean() > 0.9
