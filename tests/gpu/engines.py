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
    check_refused,
    check_stop_tokens,
    make_prompts,
    plain_logps,
    play,
)
from figures import record
from tools import (
    DEVICE,
    DRY,
    make_batch,
    make_model,
    need,
    policy_loss,
    sglang_args,
    used_gib,
    worker_config,
)
from transformers import AutoModelForCausalLM

from rl2.config.engines import ENGINES
from rl2.engine.base import EngineSettings
from rl2.parallel.device import compute_dtype
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker


def engine_settings(kind, name, device, max_running_requests):
    return EngineSettings(
        model_name=name,
        dtype=compute_dtype("auto", device),
        device=device,
        max_running_requests=max_running_requests,
        deterministic=False,
        gpu_memory_utilization=0.5,
        engine_args=sglang_args() if kind == "sglang" else {},
    )


def start(kind, settings):
    before = time.perf_counter()
    engine = pkgutil.resolve_name(ENGINES[kind])(settings)
    record(start_seconds=time.perf_counter() - before)
    return engine


def logp_differences(generations, prompts, model, temperature):
    """Returns |engine's log-probability - plain fp32 forward's| of every sampled token."""
    differences = []
    for prompt, out in zip(prompts, generations, strict=True):
        expected = plain_logps(model, prompt, out.tokens, temperature)
        differences.append((expected - torch.tensor(out.logps)).abs())
    return torch.cat(differences)


def check_sampling(engine, prompts, model):
    """Checks log-probabilities, lengths, stop tokens and groups."""
    for temperature in (1.0, 0.6):
        generations = play(engine, prompts, temperature=temperature, max_new_tokens=40)
        gaps = logp_differences(generations, prompts, model, temperature)
        figures = {
            f"logps_at_{temperature}": gaps.max().item(),
            f"mean_logps_at_{temperature}": gaps.mean().item(),
        }
        record(**figures)
        assert gaps.max() < 0.3 and gaps.mean() < 0.03
        assert all(len(out.tokens) == 40 for out in generations)
        assert all(out.finish_reason == "length" and out.version == 0 for out in generations)
    stop_ids = tuple(range(2, 500))
    answers = play(engine, prompts * 3, max_new_tokens=8, stop_token_ids=stop_ids)
    check_stop_tokens(answers, stop_ids)
    group = play(engine, [prompts[2]] * 8, max_new_tokens=20)
    assert len({tuple(out.tokens) for out in group}) == 8, "the samples of a group are the same"


def greedy_tokens(engine, prompts):
    return [out.tokens for out in play(engine, prompts, temperature=0.0, max_new_tokens=10)]


def contract(kind, max_running_requests):
    """Checks the contract of an engine on the GPU, within the rounding error of bf16.

    tests/engine_contract.py and tests/test_engine.py check the same on a CPU in fp32.
    """
    need(kind)
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    device, name = init_distributed(), make_model("small")
    dtype = compute_dtype("auto", device)
    actor = Worker(worker_config(name, lr=0.05), device, num_updates=8)
    settings = engine_settings(kind, name, device, max_running_requests)
    engine = start(kind, settings)
    check_attributes(engine, settings)
    engine.load_weights(actor.iter_full_weights(dtype), actor.version)
    prompts = make_prompts(12, 60, 1024)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    check_sampling(engine, prompts, model)
    greedy = greedy_tokens(engine, prompts)
    check_refused(engine, [], "no tokens", max_new_tokens=1)
    check_refused(engine, [1024], "vocabulary", max_new_tokens=1)
    engine.verify_weights(actor.iter_full_weights(dtype), actor.version)
    aborted = abort_all(engine, prompts * 8, max_new_tokens=400)
    assert all(len(out.tokens) == len(out.logps) <= 400 for out in aborted)
    assert any(out.finish_reason == "abort" for out in aborted)
    engine.sleep()  # immediately afterwards
    for _ in range(2):
        actor.update(make_batch(longest=20), policy_loss)
    engine.wake()
    engine.load_weights(actor.iter_full_weights(dtype), actor.version)
    stale = logp_differences(play(engine, prompts, max_new_tokens=40), prompts, model, 1.0)
    weights = dict(actor.iter_full_weights(torch.float32))
    for key, parameter in model.named_parameters():
        parameter.data.copy_(weights[key])
    generations = play(engine, prompts, max_new_tokens=40)
    gaps = logp_differences(generations, prompts, model, 1.0)
    record(
        logps_after_load=gaps.max().item(),
        mean_logps_after_load=gaps.mean().item(),
        stale=stale.mean().item(),
    )
    assert gaps.max() < 0.3 and gaps.mean() < 0.03
    assert 3 * gaps.mean() + 0.03 < stale.mean(), "the load was not seen"
    assert all(out.version == 2 for out in generations)
    assert greedy_tokens(engine, prompts) != greedy
    engine.close()
    check_no_process_left(others)
    dist.destroy_process_group()


def engine_dtype():
    return compute_dtype("auto", DEVICE)


def sglang():
    """Tests one SGLang engine beside an actor of 1.7B, both of which give their memory back.

    One start of the engine serves all steps, because it takes a minute.
    """
    need("sglang")  # skips before the large model is created
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    device, name = init_distributed(), make_model("qwen3-1.7b")
    offload = {"offload_model": True, "offload_optimizer": True}
    actor = Worker(worker_config(name, **offload), device, num_updates=8)
    before = used_gib()
    engine = start("sglang", engine_settings("sglang", name, device, 8 if DRY else 256))
    engine.load_weights(actor.iter_full_weights(engine_dtype()), actor.version)
    check_sleep(actor, engine, before)
    engine.close()
    check_no_process_left(others)
    check_memory_is_free(before)


def check_sleep(actor, engine, before):
    """Measures memory and seconds of sleeping, waking and loading the same weights, many times.

    `before` is the GPU memory in use, in GiB, when there was no engine. Memory, open files and
    shared memory do not grow with the rounds, and answers stay.
    """
    dtype = engine_dtype()
    size = sum(weight.nbytes for _, weight in actor.iter_full_weights(dtype))
    running = used_gib()
    prompts = make_prompts(8, 50, 1000)
    rounds, files, shared, answers = [], [], [], []
    for version in range(1, 5 if DRY else 13):
        times, used = {}, {}

        def load(version=version):
            engine.load_weights(actor.iter_full_weights(dtype), version)

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


def check_memory_is_free(before):
    ends = time.monotonic() + 20
    while (closed := used_gib()) > before + 0.5 and time.monotonic() < ends:
        time.sleep(0.5)
    record(closed_gib=closed)
    assert closed < before + 0.5, "memory is held after the end"
