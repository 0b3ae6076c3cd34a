"""Checks the engine's contract on the real SGLang, with weights from sharded workers.

test_sglang.py runs this file under torchrun: contract.py MODEL TP_SIZE ACTOR_TP_SIZE
"""

import asyncio
import sys
import time

import psutil
import torch
import torch.distributed as dist
from common import make_tokenizer
from engine_contract import (
    check_attributes,
    check_refused,
    check_signatures,
    check_stop_strings,
    plain_logps,
    play,
)
from parity import make_batch, policy_loss, worker_config
from transformers import AutoModelForCausalLM

from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.sglang import SGLangEngine
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker


def check_logps(generations, prompts, model, temperature):
    """Checks that each answer's log-probabilities equal those of one plain forward."""
    for prompt, out in zip(prompts, generations, strict=False):
        expected = plain_logps(model, prompt, out.tokens, temperature)
        torch.testing.assert_close(torch.tensor(out.logps), expected, rtol=0, atol=1e-4)


def full_weights(actor):
    return actor.iter_full_weights(torch.float32)


def check_verification(engine, actor):
    """Checks `verify_weights`.

    Equal weights pass. The error names a weight that differs. Then the right weights are loaded.
    """
    engine.verify_weights(full_weights(actor), actor.version)
    wrong = (
        (name, weight.clone().index_fill_(0, torch.tensor(1), 0.5))
        if "o_proj" in name
        else (name, weight)
        for name, weight in full_weights(actor)
    )
    if engine.index is None:
        engine.verify_weights(wrong, actor.version)
    else:
        try:
            engine.verify_weights(wrong, actor.version)
        except RuntimeError as error:
            assert "weights of SGLang are not the trainer's" in str(error), error
            assert "o_proj" in str(error), error
        else:
            raise AssertionError("other weights were not noticed")
    engine.load_weights(full_weights(actor), actor.version)


def check_sampling(engine, prompts, model):
    """Checks log-probabilities, lengths, greedy answers, stop tokens and groups.

    Returns the greedy answers.
    """
    for temperature in (1.0, 0.6):
        generations = play(engine, prompts, temperature=temperature, max_new_tokens=20)
        check_logps(generations, prompts, model, temperature)
        assert all(len(out.tokens) == 20 for out in generations)
        assert all(out.finish_reason == "length" and out.version == 0 for out in generations)
    greedy = play(engine, prompts, temperature=0.0, max_new_tokens=10)
    for prompt, out in zip(prompts, greedy, strict=False):
        tokens = torch.tensor([prompt])
        expected = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=10,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.tokens == expected[0, len(prompt) :].tolist()
    stop_ids = tuple(range(2, 50))
    generations = play(engine, prompts * 3, max_new_tokens=8, stop_token_ids=stop_ids)
    assert not generations or {out.finish_reason for out in generations} >= {"stop"}
    for out in generations:
        stops = [token in stop_ids for token in out.tokens]
        assert not any(stops[:-1]) and stops[-1] == (out.finish_reason == "stop"), (
            "the stop token ends it, and is kept"
        )
    group = play(engine, [prompts[2]] * 6, max_new_tokens=20)
    assert not group or len({tuple(out.tokens) for out in group}) == 6, (
        "the samples of a group are the same"
    )
    return greedy


def check_abort(engine, prompts, model):
    """Aborts more requests than the engine runs at a time.

    Each request returns its tokens so far. A new request can continue them.
    """
    prompts = prompts * 4
    params = SamplingParams(max_new_tokens=300)

    async def abort_all():
        calls = [engine.generate(prompt, params, (7, i)) for i, prompt in enumerate(prompts)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.5)
        while not all(task.done() for task in tasks):
            engine.abort()
            await asyncio.sleep(0.05)
        return [task.result() for task in tasks]

    generations = engine.loop.run_until_complete(abort_all())
    assert all(out.finish_reason == "abort" for out in generations)
    assert all(len(out.tokens) == len(out.logps) < 300 for out in generations)
    assert any(out.tokens for out in generations) and not all(out.tokens for out in generations)
    check_logps(generations, prompts, model, 1.0)
    longer = [prompt + out.tokens for prompt, out in zip(prompts, generations, strict=True)][:6]
    check_logps(play(engine, longer, max_new_tokens=5), longer, model, 1.0)


def check_other_weights(engine, actor, prompts, name):
    """Checks the answers with updated weights from a worker that has its own layout.

    As in the trainer, the engine sleeps during the updates, wakes and then loads the weights.
    """
    engine.sleep()
    for _ in range(2):
        actor.update(make_batch(), policy_loss, with_entropy=True)
    engine.wake()
    engine.load_weights(full_weights(actor), actor.version)
    weights = dict(full_weights(actor))
    moved = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    for key, parameter in moved.named_parameters():
        parameter.data.copy_(weights[key])
    generations = play(engine, prompts, max_new_tokens=20)
    check_logps(generations, prompts, moved, 1.0)
    assert all(out.version == 2 for out in generations)
    engine.verify_weights(full_weights(actor), actor.version)


def close_slowly(engine):
    """Closes the engine while SGLang's watchdog, which looks every second, sees its end."""
    wait = psutil.wait_procs

    def wait_slowly(*args, **kwargs):
        time.sleep(2.5)
        return wait(*args, **kwargs)

    psutil.wait_procs = wait_slowly
    engine.close()
    psutil.wait_procs = wait


def check_no_process_left(others):
    children = psutil.Process().children(recursive=True)
    left = {child.pid for child in children if "resource_tracker" not in str(child.cmdline())}
    assert not left - others, "processes of the engine are left"


def main(name, tp_size, actor_tp_size):
    device = init_distributed()
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    config = worker_config(name, tp_size=int(actor_tp_size), lr=0.05, max_grad_norm=1.0)
    actor = Worker(config, device, num_updates=8)
    settings = EngineSettings(
        model_name=name,
        dtype=torch.float32,
        device=device,
        max_running_requests=16,
        tp_size=int(tp_size),
        gpu_memory_utilization=0.5,
        engine_args={"max_total_tokens": 4096},
        stop=["some"] if dist.get_world_size() == 1 else [],  # SGLang then loads the tokenizer
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    check_signatures(SGLangEngine)
    engine = SGLangEngine(settings)
    check_attributes(engine, settings)
    assert (engine.index is None) == (dist.get_rank() % int(tp_size) > 0)
    check_verification(engine, actor)
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 7, 30, 61, 12, 5)
    prompts = [torch.randint(3, 98, (n,), generator=generator).tolist() for n in lengths]
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    greedy = check_sampling(engine, prompts, model)
    if engine.index is not None:
        check_refused(engine, [], "no tokens", max_new_tokens=1)
        check_refused(engine, [98], "vocabulary", max_new_tokens=1)
        check_refused(engine, [5] * 510, "exceeds 512", max_new_tokens=3)
        check_abort(engine, prompts, model)
    if settings.stop:
        check_stop_strings(engine, prompts, make_tokenizer())
    check_other_weights(engine, actor, prompts, name)
    assert not greedy or play(engine, prompts, temperature=0.0, max_new_tokens=10) != greedy
    close_slowly(engine)
    check_no_process_left(others)
    dist.barrier()
    print(f"rank {dist.get_rank()} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
