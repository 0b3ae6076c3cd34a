"""Checks engines that two ranks share, on the real vLLM.

test_group.py runs this file under torchrun: group.py CHECK MODEL
"""

import asyncio
import sys
import time

import torch
import torch.distributed as dist
from engine_contract import make_prompts, play, serve
from transformers import AutoModelForCausalLM

from rl2.engine import vllm
from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.vllm import VLLMEngine
from rl2.parallel.mesh import init_distributed


def make_engine(name, tp_size=2, **options):
    """An engine of all ranks."""
    settings = EngineSettings(
        name,
        torch.float32,
        torch.device("cpu"),
        tp_size=tp_size,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        **options,
    )
    return VLLMEngine(settings)


def record_preemptions(engine):
    """A list that gets the requests whose keys and values vLLM throws away."""
    preempted = []
    scheduler = engine.engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def recorded_preempt(request, *args, **kwargs):
        preempted.append(request)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = recorded_preempt
    return preempted


def check_answers(name):
    """The answers are those of an engine of one rank, also where the cache is too small for all."""
    arguments = {"num_gpu_blocks_override": 24, "max_model_len": 512}  # of 32 tokens
    prompts = make_prompts(24)
    answers = []
    for tp_size in (2, 1):
        engine = make_engine(
            name, tp_size, max_running_requests=12, stop=["a", "qu"], engine_args=arguments
        )
        preempted = record_preemptions(engine)
        answers.append(
            [
                play(engine, prompts, max_new_tokens=60, **params)
                for params in (
                    {"temperature": 1.0, "stop_token_ids": (10, 11)},
                    {"temperature": 0.7, "top_p": 0.8, "top_k": 9},
                    {"temperature": 1.0, "stop": ["a", "qu"]},
                )
            ]
        )
        engine.close()
        if tp_size == 2:
            assert preempted
    if engine.index == 0:
        for shared, alone in zip(*answers, strict=True):
            num_same = sum(a.tokens == b.tokens for a, b in zip(shared, alone, strict=True))
            assert num_same >= len(prompts) - 1, "rounding moves few draws"
            for a, b in zip(shared, alone, strict=True):
                if a.tokens == b.tokens:
                    assert a.finish_reason == b.finish_reason
                    torch.testing.assert_close(a.logps, b.logps, rtol=0, atol=1e-4)
        assert any(out.finish_reason == "stop" for out in answers[0][2])


def check_turns(name):
    """Requests come one after the other, are cancelled and aborted, and a rollout may fail.

    While none is in flight, neither rank computes, and the loop is free.
    """
    engine = make_engine(name, max_running_requests=2)
    if engine.index is None:
        start = time.process_time()
        serve(engine, 1)
        assert time.process_time() - start < 1.5, "it does not wait, it computes"
        serve(engine, 4)
        assert not engine.requests and not engine.engine.has_unfinished_requests()
        engine.sleep()
        engine.close()
        return
    expected = play(engine, [[9, 8]], [(5, 0)], max_new_tokens=5)
    params = SamplingParams(max_new_tokens=5)
    long = SamplingParams(max_new_tokens=400)

    async def play_turns():
        turns = []
        for _ in range(3):
            turns.append(await engine.generate([9, 8], params, (5, 0)))
            start = time.process_time()
            for _ in range(10):
                await asyncio.sleep(0.1)
            assert time.process_time() - start < 0.5, "the loop is busy"
        return turns

    async def cancel_three_and_generate():
        tasks = [asyncio.ensure_future(engine.generate([5], long, (0, i))) for i in range(3)]
        await asyncio.sleep(0.1)  # two run, one waits
        for task in tasks:
            task.cancel()
        return await engine.generate([9, 8], params, (5, 0))

    async def fail():
        asyncio.ensure_future(engine.generate([5], long, (0, 0)))
        await asyncio.sleep(0.1)
        raise KeyError("the environment")

    for turn in engine.run(play_turns()):
        assert turn.tokens == expected[0].tokens
    assert engine.run(cancel_three_and_generate()).tokens == expected[0].tokens
    try:
        engine.run(fail())
    except KeyError:
        pass
    assert play(engine, [[9, 8]], [(5, 0)], max_new_tokens=5)[0].tokens == expected[0].tokens
    try:
        engine.loop.run_until_complete(engine.generate([9, 8], params, (5, 0)))
    except AssertionError as error:
        assert "outside of Engine.run" in str(error)
    else:
        raise AssertionError("the other rank does not compute")
    assert not engine.requests and not engine.engine.has_unfinished_requests()
    engine.sleep()
    engine.close()


def check_weights(name):
    """A wrong bit in the half of a matrix that one rank has is an error on both.

    A model that diverges fails the requests alone.
    """
    engine = make_engine(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    weights = {key: tensor.detach() for key, tensor in model.named_parameters()}
    engine.verify_weights(weights.items(), 1)
    before = play(engine, [[5, 6]], max_new_tokens=8)

    def change(model):
        weight = model.model.layers[1].mlp.down_proj.weight.data
        assert weight.shape[1] == model.config.intermediate_size // 2
        weight[3, 2].view(torch.int32).bitwise_xor_(1)

    for rank in (0, 1):
        if dist.get_rank() == rank:
            engine.engine.apply_model(change)
        try:
            engine.verify_weights(weights.items(), 2)
        except RuntimeError as error:
            assert "1 weights of vLLM" in str(error) and "layers.1.mlp.down_proj" in str(error)
        else:
            raise AssertionError(f"rank {dist.get_rank()} has not heard of it")
        assert engine.version is None
        engine.verify_weights(weights.items(), 2)  # they have been loaded
    nans = {key: torch.full_like(weight, float("nan")) for key, weight in weights.items()}
    engine.load_weights(nans.items(), 3)
    try:
        play(engine, [[5, 6]], max_new_tokens=8)
    except RuntimeError as error:
        assert "diverged" in str(error)
    else:
        assert engine.index is None
    engine.load_weights(weights.items(), 4)
    after = play(engine, [[5, 6]], max_new_tokens=8)
    assert [out.tokens for out in after] == [out.tokens for out in before]
    engine.close()


def check_other_draws(name):
    """A rank that draws other tokens ends the job. It prints the time."""
    engine = make_engine(name)
    if engine.index is None:
        print(f"failed at {time.time()}", flush=True)
        vllm.single_seed = len
    play(engine, [[5, 6]] * 4, max_new_tokens=400)
    raise AssertionError("nothing was noticed")


if __name__ == "__main__":
    init_distributed()
    check, model_name = sys.argv[1:]
    globals()[f"check_{check}"](model_name)
    dist.barrier()
    print(f"rank {dist.get_rank()} is done", flush=True)
    dist.destroy_process_group()
