"""Tests the engines on a GPU: contract, agreement with the trainer, weight sync, memory."""

import pkgutil
import shutil
import time

import psutil
import torch
import torch.distributed as dist
from engine_contract import (
    abort_all,
    check_attributes,
    check_no_process_left,
    check_other_weights,
    check_refused,
    check_sampling,
    logp_gaps,
    make_prompts,
    play,
    sent_weights,
)
from figures import record
from parity import make_batch
from tools import (
    DRY,
    check_memory_is_free,
    check_rounding,
    make_model,
    need,
    sglang_args,
    used_gib,
    worker_config,
)
from transformers import AutoModelForCausalLM

from rl2.batch import Sample, collate
from rl2.config.engines import ENGINES
from rl2.engine.base import EngineSettings
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker


def start(kind, actor, max_running_requests):
    """An engine of the kind with the weights of `actor`."""
    settings = EngineSettings(
        model_name=actor.config.model_name,
        dtype=actor.dtype,
        device=actor.mesh.device,
        max_running_requests=max_running_requests,
        deterministic=False,
        gpu_memory_utilization=0.5,
        engine_args=sglang_args() if kind == "sglang" else {},
    )
    before = time.perf_counter()
    engine = pkgutil.resolve_name(ENGINES[kind])(settings)
    record(start_seconds=time.perf_counter() - before)
    check_attributes(engine, settings)
    engine.load_weights(sent_weights(actor), actor.version)
    return engine


def check_rounded_logps(generations, prompts, model, temperature):
    """As check_logps, within the rounding error of bf16."""
    gaps = logp_gaps(generations, prompts, model, temperature)
    name = f"logps_at_{temperature}_of_version_{generations[0].version}"
    record(**{name: gaps.max().item(), f"mean_{name}": gaps.mean().item()})
    assert gaps.max() < 0.3 and gaps.mean() < 0.03
    return gaps


def greedy_tokens(engine, prompts):
    return [out.tokens for out in play(engine, prompts, temperature=0.0, max_new_tokens=10)]


def contract(kind, max_running_requests):
    """Checks the contract of an engine on the GPU.

    tests/engine_contract.py and tests/test_engine.py check the same on a CPU in fp32.
    """
    need(kind)
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    device, name = init_distributed(), make_model("small")
    actor = Worker(worker_config(name, lr=0.05), device, num_updates=8)
    engine = start(kind, actor, max_running_requests)
    prompts = make_prompts(12, 60, 1024)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    check_sampling(engine, prompts, model, check_rounded_logps, length=40)
    greedy = greedy_tokens(engine, prompts)
    check_refused(engine, [], "no tokens", max_new_tokens=1)
    check_refused(engine, [1024], "vocabulary", max_new_tokens=1)
    engine.verify_weights(sent_weights(actor), actor.version)
    aborted = abort_all(engine, prompts * 8, max_new_tokens=400)
    assert all(len(out.tokens) == len(out.logps) <= 400 for out in aborted)
    assert any(out.finish_reason == "abort" for out in aborted)
    # Immediately afterwards the engine sleeps.
    check_other_weights(engine, actor, prompts, model, check_rounded_logps, length=40)
    assert greedy_tokens(engine, prompts) != greedy
    engine.close()
    check_no_process_left(others)
    dist.destroy_process_group()


def sglang():
    """Tests one SGLang engine beside an actor of 1.7B, both of which give their memory back.

    One start of the engine serves all steps, because it takes a minute.
    """
    need("sglang")  # skips before the large model is created
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    device, name = init_distributed(), make_model("qwen3-1.7b")
    offload = {"offload_model": True, "offload_optimizer": True}
    actor = Worker(worker_config(name, **offload), device, num_updates=8)
    # Kernels, workspaces and NCCL's buffers of this process stay: they must be there before.
    batch = make_batch()
    check_rounding(batch, name, trainer=actor.score(batch).logps)
    for _ in sent_weights(actor):
        pass
    before = used_gib()
    engine = start("sglang", actor, 8 if DRY else 256)
    check_agreement(actor, engine)
    check_sleep(actor, engine, before)
    engine.close()
    check_no_process_left(others)
    check_memory_is_free(before)


def check_agreement(actor, engine):
    """Compares log-probabilities of answers with fp32: the engine's and the trainer's."""
    prompts = make_prompts(16, 60, 1000)
    samples = []
    answers = play(engine, prompts, max_new_tokens=64)
    for i, (prompt, out) in enumerate(zip(prompts, answers, strict=True)):
        mask = [0] * len(prompt) + [1] * len(out.tokens)
        logps = [0.0] * len(prompt) + out.logps
        samples.append(Sample(prompt + out.tokens, mask, logps, [0.0] * len(mask), i, i))
    batch = collate(samples)
    logps = {"engine": batch.engine_logps, "trainer": actor.score(batch).logps}
    check_rounding(batch, actor.config.model_name, **logps)


def check_sleep(actor, engine, before):
    """Measures memory and seconds of sleeping, waking and loading the same weights, many times.

    `before` is the GPU memory in use, in GiB, when there was no engine. Memory, open files and
    shared memory do not grow with the rounds, and answers stay.
    """
    size = sum(weight.nbytes for _, weight in sent_weights(actor))
    running = used_gib()
    prompts = make_prompts(8, 50, 1000)
    rounds, files, shared, answers = [], [], [], []
    for version in range(1, 5 if DRY else 13):
        times, used = {}, {}

        def load(version=version):
            engine.load_weights(sent_weights(actor), version)

        for verb, call in {"sleep": engine.sleep, "wake": engine.wake, "load": load}.items():
            start = time.perf_counter()
            call()
            times[verb] = time.perf_counter() - start
            used[verb] = used_gib()
        rounds.append((times, used))
        files.append(psutil.Process().num_fds())
        shared.append(shutil.disk_usage("/dev/shm").used / 2**20)
        answers.append(greedy_tokens(engine, prompts))
    best = {verb: min(times[verb] for times, _ in rounds) for verb in rounds[0][0]}
    record(**{f"{verb}_seconds": value for verb, value in best.items()})
    record(gigabytes=size / 1e9, gb_per_s=size / best["load"] / 1e9)
    record(before_gib=before, running_gib=running)
    used = rounds[-1][1]
    record(**{f"{verb}_gib": value for verb, value in used.items()})
    same = sum(a == b for a, b in zip(answers[0], answers[-1], strict=True))
    record(same_answers=f"{same} of {len(prompts)}")
    assert same >= 0.8 * len(prompts), "the same weights, sent again, answer differently"
    # The first rounds fill caches.
    assert used["sleep"] - rounds[2][1]["sleep"] < 0.2, "the memory of the GPU grows"
    assert files[-1] - files[2] < 10, "files stay open"
    assert shared[-1] - shared[2] < 64, "shared memory is not freed"
    if not DRY:
        # CUDA graphs stay: they hold addresses.
        assert used["sleep"] - before < 0.1 * (running - before) + 2, "memory was not given back"
        assert used["wake"] < used["load"], "keys and values came back too early"
