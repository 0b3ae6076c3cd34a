"""Helpers of the tests of all engines: requests, and the comparison with the protocol.

tests/sglang and tests/vllm_cpu run this file under torchrun, with weights from sharded workers:
engine_contract.py ENGINE MODEL [TP_SIZE ACTOR_TP_SIZE]
"""

import asyncio
import pkgutil
import sys
import time

import psutil
import torch
import torch.distributed as dist
from common import make_tokenizer
from parity import make_batch, policy_loss, worker_config
from transformers import AutoModelForCausalLM

from rl2.config.engines import ENGINES
from rl2.engine.base import Engine, EngineSettings, SamplingParams
from rl2.model.moe import find_logit_routers
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker


def check_attributes(engine: Engine, settings: EngineSettings) -> None:
    assert 1 <= engine.count <= settings.world_size
    assert engine.index is None or engine.index in range(engine.count)
    assert engine.max_running_requests == settings.max_running_requests
    assert engine.version == 0
    assert isinstance(engine.loop, asyncio.AbstractEventLoop) and not engine.loop.is_running()


def play(engine, prompts, seeds=None, **params):
    """Returns one answer per prompt, generated concurrently; [] on ranks without an index."""
    if engine.index is None:
        return []
    if seeds is None:
        seeds = [(0, i) for i in range(len(prompts))]
    sampling_params = SamplingParams(**params)

    async def generate_all():
        calls = [
            engine.generate(prompt, sampling_params, seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return await asyncio.gather(*calls)

    return engine.loop.run_until_complete(generate_all())


def make_prompts(count, longest=90, vocabulary=98):
    """Random prompts of 1 to `longest` tokens, always the same."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def check_stop_strings(engine, prompts, tokenizer):
    """Checks where stop strings end greedy answers, also answers that go on after a pause.

    The string has three tokens of an answer. Every answer is the same with it, up to the first
    token that completes it, if it has one.
    """
    if engine.index is None:
        return
    whole = play(engine, prompts, temperature=0.0, max_new_tokens=16)
    text = tokenizer.decode(whole[0].tokens[4:7])
    greedy = {"temperature": 0.0, "max_new_tokens": 16, "stop": [text, "not in any answer"]}
    stopped = play(engine, prompts, **greedy)
    lengths = []
    for out, long in zip(stopped, whole, strict=True):
        prefixes = [tokenizer.decode(long.tokens[: n + 1]) for n in range(16)]
        length = next((n for n, prefix in enumerate(prefixes, 1) if text in prefix), 16)
        is_found = text in prefixes[-1]
        assert (out.tokens, len(out.logps)) == (long.tokens[:length], length)
        assert out.finish_reason == ("stop" if is_found else "length")
        lengths += [length] if is_found else []
    length = lengths[0]
    assert 3 <= length <= 7
    begun = prompts[0] + whole[0].tokens[: length - 1]  # two of the string's three tokens
    (rest,) = play(engine, [begun], **greedy, continued_tokens=length - 1)
    assert (rest.tokens, rest.finish_reason) == (whole[0].tokens[length - 1 : length], "stop")
    (other,) = play(engine, [begun], **{**greedy, "max_new_tokens": 1})
    assert other.finish_reason == "length", "a stop string began in the prompt"
    check_refused(engine, prompts[0], "stop=['']", **{**greedy, "stop": [""]})
    check_refused(engine, prompts[0], "stop='ab'", **{**greedy, "stop": "ab"})


def check_refused(engine, prompt, message, **params):
    try:
        play(engine, [prompt], **params)
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"{prompt} with {params} was not refused")


def logp_gaps(generations, prompts, model, temperature):
    """|engine's log-probability - that of one plain forward| of every sampled token."""
    gaps = []
    for prompt, out in zip(prompts, generations, strict=False):
        inputs = torch.tensor([prompt + out.tokens], device=model.device)
        with torch.no_grad():
            logits = model(inputs).logits[0, len(prompt) - 1 : -1].float().cpu()
        log_p = (logits / temperature).log_softmax(-1)
        expected = [row[token].item() for row, token in zip(log_p, out.tokens, strict=True)]
        gaps += [abs(a - b) for a, b in zip(out.logps, expected, strict=True)]
    return torch.tensor(gaps)


def check_logps(generations, prompts, model, temperature):
    """Checks that each answer's log-probabilities equal those of one plain forward."""
    gaps = logp_gaps(generations, prompts, model, temperature)
    assert (gaps <= 1e-4).all(), gaps.max()
    return gaps


def check_no_process_left(others: set[int]) -> None:
    """Checks that this process has no children but `others`, by their ids."""
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in others]
    left = [" ".join(c.cmdline())[:80] for c in left if "resource_tracker" not in str(c.cmdline())]
    assert not left, f"processes of the engine are left: {left}"


def sent_weights(actor):
    """What the trainer sends to an engine."""
    return actor.iter_full_weights(actor.dtype)


def check_verification(engine, actor, package):
    """Checks `verify_weights` of an engine of `package`.

    Equal weights pass. The error names a weight that differs. Then the right weights are loaded.
    """
    engine.verify_weights(sent_weights(actor), actor.version)
    wrong = (
        (name, weight.clone().index_fill_(0, torch.tensor(1), 0.5))
        if "o_proj" in name
        else (name, weight)
        for name, weight in sent_weights(actor)
    )
    try:
        engine.verify_weights(wrong, actor.version)
    except RuntimeError as error:
        assert f"weights of {package} are not the trainer's" in str(error), error
        assert "o_proj" in str(error), error
    else:
        assert engine.index is None, "other weights were not noticed"
    engine.load_weights(sent_weights(actor), actor.version)


def check_sampling(engine, prompts, model, check, length):
    """Checks log-probabilities with `check`, as check_logps, lengths, stop tokens and groups."""
    for temperature in (1.0, 0.6):
        generations = play(engine, prompts, temperature=temperature, max_new_tokens=length)
        check(generations, prompts, model, temperature)
        assert all(len(out.tokens) == length for out in generations)
        assert all(out.finish_reason == "length" and out.version == 0 for out in generations)
    stop_ids = tuple(range(2, model.config.vocab_size // 2))
    generations = play(engine, prompts * 3, max_new_tokens=8, stop_token_ids=stop_ids)
    assert not generations or {out.finish_reason for out in generations} >= {"stop"}
    for out in generations:
        stops = [token in stop_ids for token in out.tokens]
        assert not any(stops[:-1]) and stops[-1] == (out.finish_reason == "stop"), (
            "the stop token ends it, and is kept"
        )
    group = play(engine, [prompts[2]] * 8, max_new_tokens=20)
    assert not group or len({tuple(out.tokens) for out in group}) == 8, (
        "the samples of a group are the same"
    )


def check_greedy(engine, prompts, model):
    """Checks that greedy answers are those of transformers."""
    answers = play(engine, prompts, temperature=0.0, max_new_tokens=10)
    for prompt, out in zip(prompts, answers, strict=False):
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


def check_penalties(engine, prompts, model, has_prompt):
    """Checks greedy answers with penalties against logits that a loop changes token by token.

    The penalty for repetition counts the prompt's tokens too if `has_prompt`.
    """
    for params in (
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.8},
        {"frequency_penalty": 0.3},
        {"presence_penalty": 0.3},
        {"frequency_penalty": -0.1, "presence_penalty": 0.4},
    ):
        answers = play(engine, prompts, temperature=0.0, max_new_tokens=10, **params)
        for prompt, out in zip(prompts, answers, strict=False):
            for end, (token, logp) in enumerate(zip(out.tokens, out.logps, strict=True)):
                answer = out.tokens[:end]
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + answer])).logits[0, -1].float()
                factor = params.get("repetition_penalty", 1.0)
                for seen in set(prompt * has_prompt + answer):
                    logits[seen] *= factor if logits[seen] < 0 else 1 / factor
                for seen in answer:
                    logits[seen] -= params.get("frequency_penalty", 0.0)
                for seen in set(answer):
                    logits[seen] -= params.get("presence_penalty", 0.0)
                assert logits[token] > logits.max() - 1e-4, (params, prompt, out.tokens)
                assert abs(logits.log_softmax(-1)[token] - logp) <= 1e-4, params


def abort_all(engine, prompts, max_new_tokens):
    """The answers to requests that are aborted when the first of them would have 10 tokens.

    A request of 10 tokens is sent before them and tells when: no machine is too fast or too slow.
    """
    begun, whole = SamplingParams(max_new_tokens=10), SamplingParams(max_new_tokens=max_new_tokens)

    async def generate_and_abort():
        first = asyncio.ensure_future(engine.generate(prompts[0], begun, (8, 0)))
        calls = [engine.generate(prompt, whole, (7, i)) for i, prompt in enumerate(prompts)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await first
        while not all(task.done() for task in tasks):
            engine.abort()
            await asyncio.sleep(0.05)
        return [task.result() for task in tasks]

    return engine.loop.run_until_complete(generate_and_abort())


def check_abort(engine, prompts, model):
    """Aborts more requests than the engine runs at a time.

    Each request returns its tokens so far. A new request can continue them.
    """
    prompts = prompts * 4
    generations = abort_all(engine, prompts, max_new_tokens=300)
    assert all(out.finish_reason == "abort" for out in generations)
    assert all(len(out.tokens) == len(out.logps) < 300 for out in generations)
    assert any(out.tokens for out in generations) and not all(out.tokens for out in generations)
    check_logps(generations, prompts, model, 1.0)
    longer = [prompt + out.tokens for prompt, out in zip(prompts, generations, strict=True)][:6]
    check_logps(play(engine, longer, max_new_tokens=5), longer, model, 1.0)


def check_other_weights(engine, actor, prompts, model, check, length):
    """Checks the answers with updated weights from a worker that has its own layout.

    As in the trainer, the engine sleeps during the updates, wakes and then loads the weights.
    `model`, which has the weights of before, gets them too.
    """
    engine.sleep()
    for _ in range(2):
        actor.update(make_batch(), policy_loss, with_entropy=True)
    engine.wake()
    engine.load_weights(sent_weights(actor), actor.version)
    generations = play(engine, prompts, max_new_tokens=length)
    stale = logp_gaps(generations, prompts, model, 1.0)
    weights = dict(actor.iter_full_weights(torch.float32))
    for key, parameter in model.named_parameters():
        parameter.data.copy_(weights[key])
    gaps = check(generations, prompts, model, 1.0)
    assert not generations or 3 * gaps.mean() + 0.03 < stale.mean(), "the load was not seen"
    assert all(out.version == 2 for out in generations)
    engine.verify_weights(sent_weights(actor), actor.version)


def check_contract(engine, settings, actor, package):
    """Checks the whole contract of a new engine of `package`, with float32 weights of `actor`.

    All ranks call. If the settings have stop strings, these are checked too.
    """
    check_attributes(engine, settings)
    check_verification(engine, actor, package)
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 7, 30, 61, 12, 5)
    prompts = [torch.randint(3, 98, (n,), generator=generator).tolist() for n in lengths]
    model = AutoModelForCausalLM.from_pretrained(settings.model_name, dtype=torch.float32)
    check_sampling(engine, prompts, model, check_logps, length=20)
    check_greedy(engine, prompts, model)
    check_penalties(engine, prompts, model, has_prompt=package != "SGLang")
    if engine.index is not None:
        check_refused(engine, [], "no tokens", max_new_tokens=1)
        check_refused(engine, [98], "vocabulary", max_new_tokens=1)
        check_refused(engine, [5] * 510, "exceeds 512", max_new_tokens=3)
        check_abort(engine, prompts, model)
    if settings.stop:
        check_stop_strings(engine, prompts, make_tokenizer())
    check_other_weights(engine, actor, prompts, model, check_logps, length=20)


def chosen_by_transformers(name, tokens):
    """[n - 1, R, K] of the tokens but the last, which run alone."""
    hf = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    chosen = []
    for router, _ in find_logit_routers(hf):
        router.register_forward_hook(
            lambda _, inputs, outputs: chosen.extend(x for x in outputs if x.dtype == torch.int64)
        )
    with torch.no_grad():
        hf(torch.tensor([tokens[:-1]]))
    return torch.stack(chosen, 1)


def check_routing(engine, name) -> None:
    """Checks that an engine with the weights of the model `name` tells what its routers choose."""
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, end] for end in range(20, 23)]
    prompts += [[30], [31, 32]]
    for start in (0, 1):
        answers = play(engine, prompts, max_new_tokens=5, experts_from=start)
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = chosen_by_transformers(name, prompt + answer.tokens)[start:]
            told = torch.from_numpy(answer.experts).long()
            assert told.shape == expected.shape
            assert torch.equal(told.sort(-1).values, expected.sort(-1).values)
    [answer] = play(engine, prompts[:1], max_new_tokens=2)
    assert answer.experts is None


def close_slowly(engine):
    """Closes the engine while SGLang's watchdog, which looks every second, sees its end."""
    wait = psutil.wait_procs

    def wait_slowly(*args, **kwargs):
        time.sleep(2.5)
        return wait(*args, **kwargs)

    psutil.wait_procs = wait_slowly
    engine.close()
    psutil.wait_procs = wait


def main(kind, name, tp_size="1", actor_tp_size="1"):
    device = init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    config = worker_config(name, tp_size=int(actor_tp_size), lr=0.05, max_grad_norm=1.0)
    actor = Worker(config, device, num_updates=8)
    options = {"stop": ["some"]}
    if kind == "sglang":
        options = {"gpu_memory_utilization": 0.5, "engine_args": {"max_total_tokens": 4096}}
        options["stop"] = ["some"] if world == 1 else []  # SGLang then loads the tokenizer
    settings = EngineSettings(
        model_name=name,
        dtype=torch.float32,
        device=device,
        max_running_requests=16,
        tp_size=int(tp_size),
        rank=rank,
        world_size=world,
        **options,
    )
    engine = pkgutil.resolve_name(ENGINES[kind])(settings)
    number, place = divmod(rank, int(tp_size))
    assert engine.index == (None if place else number)
    assert engine.count == world // int(tp_size)
    check_contract(engine, settings, actor, {"sglang": "SGLang", "vllm": "vLLM"}[kind])
    if kind == "sglang":
        close_slowly(engine)
        check_no_process_left(others)
    else:
        engine.close()
    dist.barrier()  # the trainer's group is still there
    print(f"rank {rank} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
