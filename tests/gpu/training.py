"""Tests the worker on one GPU: agreement with a CPU, offloading, utilisation and memory."""

import time

import torch
from figures import record
from parity import use_sgd
from tools import (
    DRY,
    error,
    make_batch,
    make_model,
    matrix_peak,
    policy_loss,
    synchronize,
    worker_config,
)

from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker


def two_steps(worker, batch):
    """Returns the worker's scores, the results of two SGD updates, and each weight's change."""
    use_sgd(worker)
    before = cpu_weights(worker)
    scores = worker.infer(batch, 0.9, with_entropy=True)
    updates = [worker.update(batch, policy_loss, 0.9) for _ in range(2)]
    moved = {name: weight - before[name] for name, weight in cpu_weights(worker).items()}
    return scores, updates, moved


def cpu_weights(worker):
    weights = worker.iter_full_weights(torch.float32)
    return {name: weight.cpu().clone() for name, weight in weights}


def norm_error(updates, expected):
    """The largest relative difference of the gradient norms."""
    pairs = zip(updates, expected, strict=True)
    return max(abs(update.grad_norm / other.grad_norm - 1) for update, other in pairs)


def flat(named):
    return torch.cat([tensor.flatten() for tensor in named.values()])


def worker():
    """Compares two bf16 updates on the GPU with the same updates in fp32 on a CPU.

    Compares log-probabilities, entropy, gradient norm and the change of every weight.
    """
    device = init_distributed()
    name = make_model("small")
    batch = make_batch(1024, groups=3, samples=3, prompt=40, answer=30)
    settings = {"lr": 0.1, "gradient_checkpointing": True, "max_length_per_device": 200}
    config = worker_config(name, **settings)
    scores, updates, moved = two_steps(Worker(config, device, num_updates=10), batch)
    config = worker_config(name, dtype="float32", **settings)
    cpu_worker = Worker(config, torch.device("cpu"), num_updates=10)
    cpu_scores, cpu_updates, cpu_moved = two_steps(cpu_worker, batch)
    logp_errors = (scores.logps - cpu_scores.logps).abs()
    figures = {
        "logps": logp_errors.max().item(),
        "mean_logps": (logp_errors.sum() / batch.mask.sum()).item(),
        "entropy": (scores.entropy - cpu_scores.entropy).abs().max().item(),
        "grad_norm": norm_error(updates, cpu_updates),
        "weights": error(flat(moved), flat(cpu_moved)),
        "worst_weight": max(error(moved[key], cpu_moved[key]) for key in moved),
    }
    record(**figures)
    assert figures["mean_logps"] < 0.02
    assert figures["logps"] < 0.2
    assert figures["entropy"] < 0.1
    assert figures["grad_norm"] < 0.03
    assert figures["weights"] < 0.05
    assert figures["worst_weight"] < 0.15


def offload():
    """Checks that offloading model and optimizer frees GPU memory and keeps the numbers."""
    device = init_distributed()
    name = make_model("small")
    batch = make_batch(1024, groups=3, samples=3, prompt=40, answer=30)
    updates, logps, weights = offload_run(name, device, batch, offload=False)
    off_updates, off_logps, off_weights = offload_run(name, device, batch, offload=True)
    # Not bit for bit: on a GPU the backward pass of attention adds up in any order.
    figures = {
        "grad_norm": norm_error(off_updates, updates),
        "logps": (off_logps - logps).abs().max().item(),
        "weights": max(error(off_weights[key], weights[key]) for key in weights),
    }
    record(**figures)
    assert figures["grad_norm"] < 0.01
    assert figures["logps"] < 0.1
    assert figures["weights"] < 0.01


def offload_run(name, device, batch, offload):
    """Three updates: their results, log-probabilities and weights. Checks memory and the state."""
    config = worker_config(name, lr=1e-3, offload_model=offload, offload_optimizer=offload)
    actor = Worker(config, device, num_updates=10)
    updates = [actor.update(batch, policy_loss) for _ in range(3)]
    logps = actor.infer(batch).logps
    weight_bytes = sum(4 * parameter.numel() for parameter in actor.model.parameters())
    synchronize()
    held = 0 if DRY else torch.cuda.memory_allocated() / weight_bytes
    devices = {state["exp_avg"].device.type for state in actor.optimizer.state.values()}
    assert devices == ({"cpu"} if offload or DRY else {"cuda"}), devices
    figure = f"held_{'with' if offload else 'without'}_offloading"
    record(**{figure: f"{held:.2f} of the fp32 weights"})
    assert DRY or (held < 0.2 if offload else held > 2.5), held
    weights = cpu_weights(actor)
    state = actor.state_dict()  # what a checkpoint saves, wherever it is
    actor.load_state_dict(state)
    again = actor.infer(batch).logps
    assert (again - logps).abs().max() < 1e-5, "a state that was saved and read back is another"
    assert not actor.update(batch, policy_loss).skipped
    return updates, logps, weights


def utilisation_8k():
    _utilisation(8192, 4)


def utilisation_32k():
    _utilisation(32768, 2)


def _utilisation(length, micro_batches):
    """Measures the model FLOP/s of an actor update as a share of the measured matrix peak.

    Each scored token counts 6 FLOPs per weight, plus causal attention. Recomputation does not
    count. The model is a random 1.5B model. Sequences of 2,048 tokens fill every pack, and all
    their tokens are scored.
    """
    document = 2048
    if DRY:
        length = length // 128
        document = 16
    device = init_distributed()
    name = make_model("qwen2.5-1.5b")
    settings = {
        "gradient_checkpointing": True,
        "max_length_per_device": length,
        "share_prompts": False,
    }
    actor = Worker(worker_config(name, **settings), device, num_updates=10)
    config = actor.model.hf.config
    num_sequences = length // document * micro_batches
    batch = make_batch(config.vocab_size, num_sequences, 1, 1, document, seed=1)
    tokens = int(batch.mask.sum())
    layers = actor.model.hf.base_model.layers
    body = sum(parameter.numel() for parameter in layers.parameters())
    head = config.vocab_size * config.hidden_size
    head_dim = config.hidden_size // config.num_attention_heads
    channels = config.num_hidden_layers * config.num_attention_heads * head_dim
    flops = 6 * (body + head) * tokens + 6 * channels * document * tokens
    peak = matrix_peak()
    times = []
    if not DRY:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):  # the first one makes kernels and the optimizer's state
        start = time.perf_counter()
        result = actor.update(batch, policy_loss)
        synchronize()
        times.append(time.perf_counter() - start)
        record(update_seconds=times[-1])
        assert not result.skipped
    share = flops / min(times[1:]) / peak
    record(
        parameters=f"{(body + head) / 1e9:.2f}e9",
        tokens=tokens,
        tokens_per_second=tokens / min(times[1:]),
        matrix_tflops=peak / 1e12,
        utilisation=share,
    )
    if not DRY:
        record(peak_memory_gib=torch.cuda.max_memory_allocated() / 2**30)


def memory_7b():
    """Measures the memory and time of an update of a 7B model with model and optimizer offloaded.

    The table in the README has these figures.
    """
    length = 64 if DRY else 8192
    name = make_model("qwen2.5-7b")
    device = init_distributed()
    config = worker_config(
        name,
        gradient_checkpointing=True,
        max_length_per_device=length,
        share_prompts=False,
        offload_model=True,
        offload_optimizer=True,
    )
    actor = Worker(config, device, num_updates=10)
    # Two sequences, each of which fills a micro-batch.
    prompt = length // 8
    vocabulary = actor.model.hf.config.vocab_size
    batch = make_batch(vocabulary, 2, 1, prompt, length - prompt, seed=1)
    num_parameters = sum(parameter.numel() for parameter in actor.model.parameters())
    record(parameters=f"{num_parameters / 1e9:.2f}e9")
    for _ in range(2):
        if not DRY:
            record(idle_gib=torch.cuda.memory_allocated() / 2**30)
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        assert not actor.update(batch, policy_loss).skipped
        synchronize()
        record(update_seconds=time.perf_counter() - start)
        if not DRY:
            record(peak_gib=torch.cuda.max_memory_allocated() / 2**30)
    assert DRY or torch.cuda.max_memory_allocated() < 74 * 2**30, (
        "it would not fit into 80 GB beside a sleeping engine"
    )
