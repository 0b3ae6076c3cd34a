"""Both engines on a GPU: their contract, agreement with the trainer, weight sync, memory and speed."""

import asyncio
import os
import time
from types import SimpleNamespace

import psutil
import torch
import torch.distributed as dist
from contract import play, refused
from figures import goal, record
from tools import (
    DEVICE,
    DRY,
    copy_bandwidth,
    make_batch,
    make_model,
    need_sglang,
    policy_loss,
    seconds,
    section,
    sglang_args,
    used_gib,
)
from transformers import AutoModelForCausalLM

from rl2.algorithms import losses
from rl2.batch import Sample, collate
from rl2.engine.local import LocalEngine
from rl2.engine.sglang import SGLangEngine
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker, compute_dtype

MEMORY = 0.5  # of the GPU, for SGLang


def start_sglang(name, device, max_running=64, **more):
    need_sglang()
    start = time.perf_counter()
    arguments = {**sglang_args(), **more}
    engine = SGLangEngine(
        name, compute_dtype("auto", device), device, 1, max_running, False, MEMORY, arguments, 0
    )
    record(start_seconds=time.perf_counter() - start)
    return engine


def make_prompts(vocabulary, count, longest, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def differences(told, prompts, model, temperature):
    """|engine's log-probability - that of a plain fp32 forward| of every sampled token."""
    found = []
    for prompt, out in zip(prompts, told, strict=True):
        given = torch.tensor([prompt + out.tokens], device=DEVICE)
        with torch.no_grad():
            logits = model(given).logits[0, len(prompt) - 1 : -1].float() / temperature
        expected = logits.log_softmax(-1).gather(1, given[0, len(prompt) :, None])[:, 0].cpu()
        found.append((expected - torch.tensor(out.logps)).abs())
    return torch.cat(found)


def check_contract(make):
    """What tests/test_engine.py and tests/sglang/contract.py hold on a CPU in fp32, here within bf16's rounding."""
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    device, name = init_distributed(), make_model("small")
    dtype = compute_dtype("auto", device)
    actor = Worker(section(name, lr=0.05), device, num_updates=8)
    engine = make(name, device)
    engine.load_weights(actor.iter_full_weights(dtype), actor.version)
    prompts = make_prompts(1024, 12, 60)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    for temperature in (1.0, 0.6):
        told = play(engine, prompts, temperature=temperature, max_new_tokens=40)
        gaps = differences(told, prompts, model, temperature)
        record(
            **{
                f"logps_at_{temperature}": gaps.max().item(),
                f"mean_logps_at_{temperature}": gaps.mean().item(),
            }
        )
        assert gaps.max() < 0.3 and gaps.mean() < 0.03
        assert all(
            len(out.tokens) == 40 and out.finish_reason == "length" and out.version == 0
            for out in told
        )
    stops = list(range(2, 500))
    for out in play(engine, prompts * 3, max_new_tokens=8, stop_token_ids=stops):
        hits = [token in stops for token in out.tokens]
        assert not any(hits[:-1]) and hits[-1] == (out.finish_reason == "stop"), (
            "the stop token ends it, and is kept"
        )
    group = play(engine, [prompts[2]] * 8, max_new_tokens=20)
    assert len({tuple(out.tokens) for out in group}) == 8, "the samples of a group are the same"
    greedy = [out.tokens for out in play(engine, prompts, temperature=0.0, max_new_tokens=10)]
    refused(engine, [], {"max_new_tokens": 1}, "no tokens")
    refused(engine, [1024], {"max_new_tokens": 1}, "vocabulary")
    engine.verify_weights(actor.iter_full_weights(dtype), actor.version)
    check_abort(engine, prompts)
    engine.sleep()
    for _ in range(2):
        actor.update(make_batch(1024, 3, 3, 20, 20), policy_loss)
    engine.wake()
    engine.load_weights(actor.iter_full_weights(dtype), actor.version)
    stale = differences(play(engine, prompts, max_new_tokens=40), prompts, model, 1.0)
    weights = dict(actor.iter_full_weights(torch.float32))
    for key, parameter in model.named_parameters():
        parameter.data.copy_(weights[key])
    told = play(engine, prompts, max_new_tokens=40)
    gaps = differences(told, prompts, model, 1.0)
    record(
        logps_after_load=gaps.max().item(),
        mean_logps_after_load=gaps.mean().item(),
        stale=stale.mean().item(),
    )
    assert gaps.max() < 0.3 and gaps.mean() < 0.03 < 3 * gaps.mean() + 0.03 < stale.mean(), (
        "the load was not seen"
    )
    assert all(out.version == 2 for out in told)
    assert [
        out.tokens for out in play(engine, prompts, temperature=0.0, max_new_tokens=10)
    ] != greedy
    engine.close()
    check_no_process_left(others)
    dist.destroy_process_group()


def check_abort(engine, prompts):
    """More requests than run at a time, cut short: each returns what it has, and the engine can sleep at once."""

    async def all_():
        calls = [
            engine.generate(prompt, {"max_new_tokens": 400}, (7, i))
            for i, prompt in enumerate(prompts * 8)
        ]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.3)
        while not all(task.done() for task in tasks):
            engine.abort()
            await asyncio.sleep(0.02)
        return [task.result() for task in tasks]

    told = engine.loop.run_until_complete(all_())
    assert all(len(out.tokens) == len(out.logps) <= 400 for out in told)
    assert any(out.finish_reason == "abort" for out in told)


def check_no_process_left(others):
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in others]
    left = [" ".join(c.cmdline())[:80] for c in left if "resource_tracker" not in str(c.cmdline())]
    assert not left, f"processes of the engine are left: {left}"


def local_contract():
    check_contract(
        lambda name, device: LocalEngine(name, compute_dtype("auto", device), device, 16, False)
    )


def sglang_contract():
    check_contract(start_sglang)


def _actor_and_engine(max_running=64, **changes):
    need_sglang()  # before a large model is made
    device, name = init_distributed(), make_model("qwen3-1.7b")
    actor = Worker(section(name, **changes), device, num_updates=8)
    engine = start_sglang(name, device, max_running)
    engine.load_weights(actor.iter_full_weights(engine_dtype()), actor.version)
    return actor, engine, actor.model.hf.config.vocab_size


def engine_dtype():
    return compute_dtype("auto", DEVICE)


def sglang_agreement():
    """Log-probabilities of sampled tokens by SGLang and by the worker that trains on them."""
    actor, engine, vocabulary = _actor_and_engine()
    prompts = make_prompts(vocabulary, 8 if DRY else 64, 30 if DRY else 300)
    told = play(engine, prompts, max_new_tokens=16 if DRY else 256)
    samples = []
    for i, (prompt, out) in enumerate(zip(prompts, told, strict=True)):
        zeros = [0.0] * len(prompt)
        mask = [0] * len(prompt) + [1] * len(out.tokens)
        samples.append(
            Sample(prompt + out.tokens, mask, zeros + out.logps, [0.0] * len(mask), i, i)
        )
    batch = collate(samples)
    logps = actor.infer(batch).logps
    gaps = (logps - batch.engine_logps).abs()[batch.mask > 0]
    mismatch = losses.rollout_mismatch(logps, batch.engine_logps, batch.mask / batch.mask.sum())
    record(mean=gaps.mean().item(), worst=gaps.max().item(), tokens=gaps.numel())
    record(**{name: float(value) for name, value in mismatch.items()})
    assert gaps.mean() < 0.02 and gaps.max() < 1.0
    engine.close()


def sglang_sync():
    """Seconds of wake and load, and the bytes of weights a second against what a copy on the device delivers."""
    actor, engine, _ = _actor_and_engine()
    dtype = engine_dtype()
    size = sum(weight.nbytes for _, weight in actor.iter_full_weights(dtype))
    walk = seconds(lambda: [None for _ in actor.iter_full_weights(dtype)], 3, 1)
    loads, wakes = [], []
    for version in range(1, 5):
        engine.sleep()
        start = time.perf_counter()
        engine.wake()
        wakes.append(time.perf_counter() - start)
        engine.load_weights(actor.iter_full_weights(dtype), version)
        loads.append(time.perf_counter() - start - wakes[-1])
    copied = copy_bandwidth()
    record(
        gigabytes=size / 1e9,
        wake_seconds=min(wakes),
        load_seconds=min(loads),
        weights_alone_seconds=walk,
    )
    record(gb_per_s=size / min(loads) / 1e9, copy_gb_per_s=copied / 1e9)
    goal("share_of_copy_bandwidth", size / min(loads) / copied, 0.5)
    engine.close()


def sglang_memory():
    """GPU memory in use around the engine's life; asleep it must have given back what it took, but for its graphs."""
    need_sglang()
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    device, name = init_distributed(), make_model("qwen3-1.7b")
    actor = Worker(section(name, offload_model=True, offload_optimizer=True), device, num_updates=8)
    found = {"before": used_gib()}
    engine = start_sglang(name, device)
    engine.load_weights(actor.iter_full_weights(engine_dtype()), 0)
    prompts = make_prompts(1000, 8 if DRY else 64, 50)
    before = play(engine, prompts, temperature=0.0, max_new_tokens=16)
    found["running"] = used_gib()
    for round_ in range(2):
        engine.sleep()
        found[f"asleep_{round_}"] = used_gib()
        engine.wake()
        found[f"woken_{round_}"] = used_gib()
        engine.load_weights(actor.iter_full_weights(engine_dtype()), 0)
        found[f"loaded_{round_}"] = used_gib()
    after = play(engine, prompts, temperature=0.0, max_new_tokens=16)
    record(**{f"{name}_gib": value for name, value in found.items()})
    same = sum(a.tokens == b.tokens for a, b in zip(before, after, strict=True))
    record(same_answers=f"{same} of {len(before)}")
    assert same >= 0.8 * len(before), (
        "the same weights, sent again after a sleep, answer differently"
    )
    engine.close()
    check_no_process_left(others)
    ends = time.monotonic() + 20
    while (closed := used_gib()) > found["before"] + 0.5 and time.monotonic() < ends:
        time.sleep(0.5)
    record(closed_gib=closed)
    if not DRY:
        took = found["running"] - found["before"]
        assert found["asleep_1"] - found["before"] < 0.1 * took + 2, "memory was not given back"
        assert abs(found["asleep_1"] - found["asleep_0"]) < 0.3, "something grows with every round"
        assert found["woken_1"] < found["loaded_1"], "keys and values came back too early"
        assert closed < found["before"] + 0.5, "memory is held after the end"


def sglang_throughput():
    """Sampled tokens per second of a whole rollout, environment and books included, against the same SGLang called
    offline with the same prompts and parameters."""
    from pathlib import Path

    from transformers import AutoTokenizer

    from rl2.env.contract import EnvFailures
    from rl2.env.load import load_env
    from rl2.rollout.collect import Rollout

    slots, length = (8, 16) if DRY else (256, 512)
    actor, engine, _ = _actor_and_engine(slots)
    name = actor.config.model_name
    env = Path(os.environ["RL2_GPU_MODELS"], "env.py")
    env.write_text(
        "def reward_fn(messages, answer):\n    return float(len(messages[-1]['content']) % 7)\n"
    )
    row = {"messages": [{"role": "user", "content": "hello"}], "answer": ""}
    groups = [
        SimpleNamespace(tokens=tokens, row=row) for tokens in make_prompts(1000, slots // 4, 200)
    ]
    params = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": length,
        "stop_token_ids": [],
    }
    given = {
        "engine": engine,
        "env": load_env(str(env), 60.0),
        "tokenizer": AutoTokenizer.from_pretrained(name),
    }
    given |= {
        "failures": EnvFailures(0.0),
        "max_turns": 1,
        "max_length": 40960,
        "seed": 0,
        "deterministic": False,
    }
    rollout = Rollout(**given)
    offline = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
    prompts = [group.tokens for group in groups for _ in range(4)]
    rates = {"rollout": [], "offline": []}
    for round_ in range(3):
        engine.engine.flush_cache()
        start = time.perf_counter()
        told = rollout(groups, params, 4, "train", round_)
        rates["rollout"].append(sum(t.length for t in told) / (time.perf_counter() - start))
        assert all(t.length == length for t in told) and len(told) == slots
        engine.engine.flush_cache()
        start = time.perf_counter()
        outs = engine.engine.generate(
            input_ids=prompts, sampling_params=offline, return_logprob=True
        )
        rates["offline"].append(
            sum(len(o["output_ids"]) for o in outs) / (time.perf_counter() - start)
        )
    # The first round makes kernels.
    best = {name: max(values[1:]) for name, values in rates.items()}
    record(**{f"{name}_tokens_per_second": value for name, value in best.items()})
    goal("rollout_of_offline", best["rollout"] / best["offline"], 0.95)
    engine.close()


def local_throughput():
    """Sampled tokens per second of the embedded engine, which decodes without graphs."""
    slots, length = (8, 16) if DRY else (256, 128)
    device, name = init_distributed(), make_model("qwen3-1.7b")
    engine = LocalEngine(name, compute_dtype("auto", device), device, slots, False)
    prompts = make_prompts(1000, slots, 200)

    async def all_():
        params = {"max_new_tokens": length}
        return await asyncio.gather(
            *(engine.generate(p, params, (0, i)) for i, p in enumerate(prompts))
        )

    rate = slots * length / seconds(lambda: engine.loop.run_until_complete(all_()), 2, 1)
    record(tokens_per_second=rate)
    engine.close()
