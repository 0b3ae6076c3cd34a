"""Tests the worker on one GPU: agreement with a CPU, offloading, resuming, speed and memory."""

import gc
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from figures import record
from parity import use_sgd
from tools import (
    DEVICE,
    DRY,
    allocated_gib,
    error,
    make_batch,
    make_model,
    matrix_peak,
    peak_gib,
    policy_loss,
    reset_peak,
    synchronize,
    worker_config,
)
from transformers import AutoTokenizer

from rl2.parallel.mesh import init_distributed
from rl2.run.checkpoints import Checkpoints
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


def compare_with_cpu(device, batch, **settings):
    """Compares two bf16 updates on the device with the same updates in fp32 on a CPU.

    `settings` are those of both workers; keys of a layout are of the device's worker only. Compares
    log-probabilities, entropy, gradient norm and the change of every weight.
    """
    name = make_model("small")
    actor = Worker(worker_config(name, lr=0.1, **settings), device, num_updates=10)
    scores, updates, moved = two_steps(actor, batch)
    cpu_settings = {key: value for key, value in settings.items() if not key.endswith("p_size")}
    config = worker_config(name, lr=0.1, dtype="float32", **cpu_settings)
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
    if dist.get_rank() == 0:
        record(**figures)
    limits = {"logps": 0.2, "mean_logps": 0.02, "entropy": 0.1, "grad_norm": 0.03}
    for name, limit in (limits | {"weights": 0.05, "worst_weight": 0.15}).items():
        assert figures[name] < limit, f"{name}: {figures[name]:.3g}, of at most {limit}"


def worker():
    """Compares updates on one GPU with a CPU."""
    batch = make_batch(1024, groups=3, samples=3, prompt=40, answer=30)
    settings = {"gradient_checkpointing": True, "max_length_per_device": 200}
    compare_with_cpu(init_distributed(), batch, **settings)


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
    weight_gib = sum(4 * parameter.numel() for parameter in actor.model.parameters()) / 2**30
    held = allocated_gib() / weight_gib
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


def resume():
    """Resumes from a checkpoint, and starts from an exported optimizer, with each offload.

    The update after that must be the update of the worker that went on.
    """
    device = init_distributed()
    name = make_model("small")
    batch = make_batch(1024, groups=3, samples=3, prompt=40, answer=30)
    tokenizer = AutoTokenizer.from_pretrained(name)
    for model, optimizer in product((False, True), (False, True)):
        settings = {"lr": 1e-3, "offload_model": model, "offload_optimizer": optimizer}
        errors = resume_errors(worker_config(name, **settings), device, batch, tokenizer)
        offloaded = "+".join(key for key, on in (("model", model), ("state", optimizer)) if on)
        record(**{f"error_offload_{offloaded or 'none'}": max(errors.values())})
        assert max(errors.values()) < 0.02, (offloaded, errors)


def resume_errors(config, device, batch, tokenizer) -> dict[str, float]:
    """The differences between a worker that goes on and others that start from its files."""
    first = Worker(config, device, num_updates=10)
    for _ in range(2):
        first.update(batch, policy_loss)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder, "checkpoints"))
        checkpoints.save(2, {"actor": first}, {})
        first.export(f"{folder}/export", tokenizer, with_optimizer=True)
        resumed = Worker(config, device, num_updates=10)
        checkpoints.load(checkpoints.path(2), {"actor": resumed}, saved_by=1)
        exported = replace(config, model_name=f"{folder}/export", optimizer_dir=f"{folder}/export")
        started = Worker(exported, device, num_updates=10)
    workers = {"": first, "resumed": resumed, "optimizer_dir": started}
    norms = {}
    for kind, worker_ in workers.items():
        result = worker_.update(batch, policy_loss)
        assert not result.skipped
        norms[kind] = result.grad_norm
    moments = {kind: first_moment(worker_) for kind, worker_ in workers.items()}
    errors = {}
    for kind in ("resumed", "optimizer_dir"):
        errors[f"{kind}_norm"] = abs(norms[kind] / norms[""] - 1)
        errors[f"{kind}_moments"] = error(moments[kind], moments[""])
    return errors


def first_moment(actor):
    """The first moments of all parameters, in one row."""
    return flat({name: x.cpu() for name, x in actor.optimizer.moments["exp_avg"].items()})


def utilisation(length, num_micro_batches):
    """Measures the model FLOP/s of an actor update as a share of the measured matrix peak.

    Each scored token counts 6 FLOPs per weight, plus causal attention. Recomputation does not
    count. The model is a random 1.5B model. Sequences of 2,048 tokens fill every pack, and all
    their tokens are scored.
    """
    peak = matrix_peak()
    actor = make_actor("qwen2.5-1.5b", length)
    measured = time_updates(actor, full_batch(actor, length, num_micro_batches, 2048))
    per_second = flops_per_token(actor, scaled(2048)) * measured["tokens_per_second"]
    record(**measured, matrix_tflops=peak / 1e12, utilisation=per_second / peak)


def scaled(tokens):
    return tokens // 128 if DRY else tokens


def make_actor(name, length, **settings):
    """A worker whose micro-batches have `length` tokens."""
    gc.collect()  # an actor of before is in cycles
    device = DEVICE if dist.is_initialized() else init_distributed()
    settings = {
        "gradient_checkpointing": True,
        "max_length_per_device": scaled(length),
        "share_prompts": False,
        **settings,
    }
    return Worker(worker_config(make_model(name), **settings), device, num_updates=10)


def full_batch(actor, length, num_micro_batches, document):
    """Sequences of `document` tokens that fill micro-batches of `length`. All are scored."""
    num_sequences = length // document * num_micro_batches
    vocabulary = actor.model.hf.config.vocab_size
    return make_batch(vocabulary, num_sequences, 1, 1, scaled(document), seed=1)


def time_updates(actor, batch):
    """Times three updates. The first makes kernels and the optimizer's state; it is not counted."""
    reset_peak()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        result = actor.update(batch, policy_loss)
        synchronize()
        times.append(time.perf_counter() - start)
        assert not result.skipped
    return {
        "first_update_seconds": times[0],
        "update_seconds": min(times[1:]),
        "tokens_per_second": int(batch.mask.sum()) / min(times[1:]),
        "peak_memory_gib": peak_gib(),
        "grad_norm": result.grad_norm,
    }


def flops_per_token(actor, document):
    """6 FLOPs per weight of layers and head, and causal attention over `document` tokens."""
    config = actor.model.hf.config
    body = sum(p.numel() for p in actor.model.hf.base_model.layers.parameters())
    head = config.vocab_size * config.hidden_size
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    channels = config.num_hidden_layers * config.num_attention_heads * head_dim
    return 6 * (body + head) + 6 * channels * document


VARIANTS = {  # keys of an actor that are faster or larger
    "plain": {},
    "half_recomputed": {"gradient_checkpointing": 1 if DRY else 14},
    "compiled": {"compile": True},
}


def variants_8k():
    """Compares updates of 1.5B with actor.compile, and with fewer layers that run again.

    Compares results, times and memory. Packs of another length must not compile again.
    """
    from torch._dynamo.utils import counters

    measured = {}
    for kind, keys in VARIANTS.items():
        actor = None  # its memory is free before the next one is made
        actor = make_actor("qwen2.5-1.5b", 8192, **keys)
        measured[kind] = time_updates(actor, full_batch(actor, 8192, 2, 2048))
        record(**{f"{kind}_{key}": value for key, value in measured[kind].items()})
        seconds, plain_seconds = (measured[k]["update_seconds"] for k in (kind, "plain"))
        record(**{f"{kind}_speed_up": plain_seconds / seconds})
        assert abs(measured[kind]["grad_norm"] / measured["plain"]["grad_norm"] - 1) < 0.02
    graphs = counters["stats"]["unique_graphs"]
    record(graphs=graphs)
    assert graphs, "nothing was compiled"
    actor.update(full_batch(actor, 8192, 1, 1024), policy_loss)
    actor.update(full_batch(actor, 6144, 1, 1536), policy_loss)
    assert counters["stats"]["unique_graphs"] == graphs, "another length compiled again"
