"""Tests the worker on one GPU: agreement with a CPU, offloading, utilisation and memory."""

import time

import torch
from figures import record
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
    worker.optimizer = torch.optim.SGD(
        [{"params": [p]} for p in worker.model.parameters()], lr=worker.config.lr
    )
    before = {
        name: weight.cpu().clone() for name, weight in worker.iter_full_weights(torch.float32)
    }
    scores = worker.infer(batch, 0.9, with_entropy=True)
    told = [worker.update(batch, policy_loss, 0.9) for _ in range(2)]
    moved = {
        name: weight.cpu() - before[name]
        for name, weight in worker.iter_full_weights(torch.float32)
    }
    return scores, told, moved


def flat(named):
    return torch.cat([tensor.flatten() for tensor in named.values()])


def worker():
    """Compares two bf16 updates on the GPU with the same updates in fp32 on a CPU.

    Compares log-probabilities, entropy, gradient norm and the change of every weight.
    """
    device, name = init_distributed(), make_model("small")
    batch = make_batch(1024, groups=3, samples=3, prompt=40, answer=30)
    results = {}
    for place, dtype in ((device, "auto"), (torch.device("cpu"), "float32")):
        settings = {
            "lr": 0.1,
            "dtype": dtype,
            "gradient_checkpointing": True,
            "max_length_per_device": 200,
        }
        results[dtype] = two_steps(
            Worker(worker_config(name, **settings), place, num_updates=10), batch
        )
    (scores, told, moved), (plain_scores, plain_told, plain_moved) = (
        results["auto"],
        results["float32"],
    )
    figures = {
        "logps": (scores.logps - plain_scores.logps).abs().max().item(),
        "mean_logps": ((scores.logps - plain_scores.logps).abs().sum() / batch.mask.sum()).item(),
        "entropy": (scores.entropy - plain_scores.entropy).abs().max().item(),
        "grad_norm": max(
            abs(a.grad_norm / b.grad_norm - 1) for a, b in zip(told, plain_told, strict=True)
        ),
        "weights": error(flat(moved), flat(plain_moved)),
        "worst_weight": max(error(moved[key], plain_moved[key]) for key in moved),
    }
    record(**figures)
    assert figures["mean_logps"] < 0.02 and figures["logps"] < 0.2 and figures["entropy"] < 0.1
    assert (
        figures["grad_norm"] < 0.03 and figures["weights"] < 0.05 and figures["worst_weight"] < 0.15
    )


def offload():
    """Checks that offloading model and optimizer frees GPU memory and keeps the numbers."""
    device, name = init_distributed(), make_model("small")
    batch, results = make_batch(1024, groups=3, samples=3, prompt=40, answer=30), {}
    for off in (False, True):
        settings = {"lr": 1e-3, "offload_model": off, "offload_optimizer": off}
        actor = Worker(worker_config(name, **settings), device, num_updates=10)
        told = [actor.update(batch, policy_loss) for _ in range(3)]
        logps = actor.infer(batch).logps
        size = sum(4 * p.numel() for p in actor.model.parameters())
        synchronize()
        held = (torch.cuda.memory_allocated() if not DRY else 0) / size
        places = {state["exp_avg"].device.type for state in actor.optimizer.state.values()}
        assert places == ({"cpu"} if off or DRY else {"cuda"}), places
        record(
            **{f"held_{'with' if off else 'without'}_offloading": f"{held:.2f} of the fp32 weights"}
        )
        assert DRY or (held < 0.2 if off else held > 2.5), held
        weights = {key: weight.cpu() for key, weight in actor.iter_full_weights(torch.float32)}
        results[off] = told, logps, weights
        state = actor.state_dict()  # a checkpoint saves this state, offloaded or not
        actor.load_state_dict(state)
        again = actor.infer(batch).logps
        assert (again - logps).abs().max() < 1e-5, "a state that was saved and read back is another"
        assert actor.update(batch, policy_loss).skipped == 0
        del actor, state
    (told, logps, weights), (off_told, off_logps, off_weights) = results[False], results[True]
    # The bits may differ: attention's backward on a GPU sums in no fixed order.
    record(
        grad_norm=max(
            abs(a.grad_norm / b.grad_norm - 1) for a, b in zip(off_told, told, strict=True)
        ),
        logps=(off_logps - logps).abs().max().item(),
        weights=max(error(off_weights[key], weights[key]) for key in weights),
    )
    assert (
        max(abs(a.grad_norm / b.grad_norm - 1) for a, b in zip(off_told, told, strict=True)) < 0.01
    )
    assert (off_logps - logps).abs().max() < 0.1
    assert max(error(off_weights[key], weights[key]) for key in weights) < 0.01


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
        length, document = length // 128, 16
    device, name = init_distributed(), make_model("qwen2.5-1.5b")
    settings = {
        "gradient_checkpointing": True,
        "max_length_per_device": length,
        "share_prompts": False,
    }
    actor = Worker(worker_config(name, **settings), device, num_updates=10)
    config = actor.model.hf.config
    batch = make_batch(
        config.vocab_size, length // document * micro_batches, 1, 1, document, seed=1
    )
    tokens = int(batch.mask.sum())
    body = sum(p.numel() for p in actor.model.hf.base_model.layers.parameters())
    head = config.vocab_size * config.hidden_size
    channels = (
        config.num_hidden_layers
        * config.num_attention_heads
        * (config.hidden_size // config.num_attention_heads)
    )
    flops = 6 * (body + head) * tokens + 6 * channels * document * tokens
    peak, times = matrix_peak(), []
    if not DRY:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):  # the first update compiles kernels and creates the optimizer's state
        start = time.perf_counter()
        told = actor.update(batch, policy_loss)
        synchronize()
        times.append(time.perf_counter() - start)
        record(update_seconds=times[-1])
        assert told.skipped == 0
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
    length, name = (64 if DRY else 8192), make_model("qwen2.5-7b")
    device = init_distributed()
    settings = {
        "gradient_checkpointing": True,
        "max_length_per_device": length,
        "share_prompts": False,
    }
    actor = Worker(
        worker_config(name, offload_model=True, offload_optimizer=True, **settings),
        device,
        num_updates=10,
    )
    config = actor.model.hf.config
    batch = make_batch(
        config.vocab_size, 2, 1, length // 8, length - length // 8, seed=1
    )  # two micro-batches
    record(parameters=f"{sum(p.numel() for p in actor.model.parameters()) / 1e9:.2f}e9")
    for _ in range(2):
        if not DRY:
            record(idle_gib=torch.cuda.memory_allocated() / 2**30)
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        assert actor.update(batch, policy_loss).skipped == 0
        synchronize()
        record(update_seconds=time.perf_counter() - start)
        if not DRY:
            record(peak_gib=torch.cuda.max_memory_allocated() / 2**30)
    assert DRY or torch.cuda.max_memory_allocated() < 74 * 2**30, (
        "it would not fit into 80 GB beside a sleeping engine"
    )
