"""Run under torchrun by test_sglang.py: the engine's contract on the real SGLang, its weights from sharded workers.

contract.py MODEL TP_SIZE ACTOR_TP_SIZE
"""

import asyncio
import sys
from types import SimpleNamespace

import psutil
import torch
import torch.distributed as dist
from parity import SECTION
from transformers import AutoModelForCausalLM

from rl2.engine.sglang import SGLangEngine
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker

ARGUMENTS = {"max_total_tokens": 4096}


def play(engine, prompts, **params):
    """One answer to each prompt, all in flight at once; [] on ranks without an engine of their own."""
    if engine.index is None:
        return []

    async def all_():
        return await asyncio.gather(
            *(engine.generate(p, params, (0, i)) for i, p in enumerate(prompts))
        )

    return engine.loop.run_until_complete(all_())


def check_logps(told, prompts, model, temperature):
    """Each answer's log-probabilities are those of one plain forward."""
    for prompt, out in zip(prompts, told, strict=False):
        with torch.no_grad():
            logits = (
                model(torch.tensor([prompt + out.tokens])).logits[0, len(prompt) - 1 : -1]
                / temperature
            )
        expected = logits.log_softmax(-1).gather(1, torch.tensor(out.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(out.logps), expected, rtol=0, atol=1e-4)


def named(actor):
    return actor.iter_full_weights(torch.float32)


def check_abort(engine, prompts, model):
    """More requests than run at a time, cut short: each returns what it has, and can be gone on from."""
    prompts = prompts * 4

    async def all_():
        calls = [engine.generate(p, {"max_new_tokens": 300}, (7, i)) for i, p in enumerate(prompts)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.5)
        while not all(task.done() for task in tasks):
            engine.abort()
            await asyncio.sleep(0.05)
        return [task.result() for task in tasks]

    told = engine.loop.run_until_complete(all_())
    assert all(
        out.finish_reason == "abort" and len(out.tokens) == len(out.logps) < 300 for out in told
    )
    assert any(out.tokens for out in told) and not all(out.tokens for out in told)
    check_logps(told, prompts, model, 1.0)
    longer = [prompt + out.tokens for prompt, out in zip(prompts, told, strict=True)][:6]
    check_logps(play(engine, longer, max_new_tokens=5), longer, model, 1.0)


def refused(engine, prompt, params, words):
    async def ask():
        await engine.generate(prompt, params, (0,))

    try:
        engine.loop.run_until_complete(ask())
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{prompt} with {params} was not refused")


def main(name, tp_size, actor_tp_size):
    device = init_distributed()
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    section = {
        **SECTION,
        "model_name": name,
        "tp_size": int(actor_tp_size),
        "lr": 0.05,
        "max_grad_norm": 1.0,
    }
    actor = Worker(SimpleNamespace(**section), device, num_updates=8)
    engine = SGLangEngine(
        name, torch.float32, device, int(tp_size), 16, True, 0.5, ARGUMENTS, dist.get_rank()
    )
    assert (engine.index is None) == (dist.get_rank() % int(tp_size) > 0)
    engine.verify_weights(actor.iter_full_weights(torch.float32), actor.version)
    wrong = (
        (k, w.clone().index_fill_(0, torch.tensor(1), 0.5)) if "o_proj" in k else (k, w)
        for k, w in named(actor)
    )
    if engine.index is not None:
        try:
            engine.verify_weights(wrong, actor.version)
        except RuntimeError as error:
            assert "weights of SGLang are not the trainer's" in str(error) and "o_proj" in str(
                error
            ), error
        else:
            raise AssertionError("other weights were not noticed")
    else:
        engine.verify_weights(wrong, actor.version)
    engine.load_weights(named(actor), actor.version)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, 98, (n,), generator=generator).tolist() for n in (1, 7, 30, 61, 12, 5)
    ]
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    for temperature in (1.0, 0.6):
        told = play(engine, prompts, temperature=temperature, max_new_tokens=20)
        check_logps(told, prompts, model, temperature)
        assert all(
            len(out.tokens) == 20 and out.finish_reason == "length" and out.version == 0
            for out in told
        )
    greedy = play(engine, prompts, temperature=0.0, max_new_tokens=10)
    for prompt, out in zip(prompts, greedy, strict=False):
        given = torch.tensor([prompt])
        settings = {
            "do_sample": False,
            "max_new_tokens": 10,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        assert (
            out.tokens
            == model.generate(given, attention_mask=torch.ones_like(given), **settings)[
                0, len(prompt) :
            ].tolist()
        )
    told = play(engine, prompts * 3, max_new_tokens=8, stop_token_ids=list(range(2, 50)))
    assert not told or {out.finish_reason for out in told} >= {"stop"}
    for out in told:
        stops = [token < 50 and token >= 2 for token in out.tokens]
        assert not any(stops[:-1]) and stops[-1] == (out.finish_reason == "stop"), (
            "the stop token ends it, and is kept"
        )
    group = play(engine, [prompts[2]] * 6, max_new_tokens=20)
    assert not group or len({tuple(out.tokens) for out in group}) == 6, (
        "the samples of a group are the same"
    )
    if engine.index is not None:
        refused(engine, [], {"max_new_tokens": 1}, "no tokens")
        refused(engine, [98], {"max_new_tokens": 1}, "vocabulary")
        refused(engine, [5] * 510, {"max_new_tokens": 3}, "exceeds 512")
    if engine.index is not None:
        check_abort(engine, prompts, model)
    # Other weights, from a worker in its own layout, between sleep and wake as the trainer does it.
    engine.sleep()
    from parity import make_batch, policy_loss

    for _ in range(2):
        actor.update(make_batch(), policy_loss, with_entropy=True)
    engine.wake()
    engine.load_weights(actor.iter_full_weights(torch.float32), actor.version)
    weights = dict(actor.iter_full_weights(torch.float32))
    moved = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    for key, parameter in moved.named_parameters():
        parameter.data.copy_(weights[key])
    told = play(engine, prompts, max_new_tokens=20)
    check_logps(told, prompts, moved, 1.0)
    assert all(out.version == 2 for out in told)
    engine.verify_weights(named(actor), actor.version)
    assert not told or play(engine, prompts, temperature=0.0, max_new_tokens=10) != greedy
    engine.close()
    left = {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if "resource_tracker" not in str(child.cmdline())
    }
    assert not left - others, "processes of the engine are left"
    dist.barrier()
    print(f"rank {dist.get_rank()} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
