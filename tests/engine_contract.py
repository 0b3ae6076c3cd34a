"""Helpers of the tests of all engines: requests, and the comparison with the protocol."""

import asyncio
import inspect

import torch

from rl2.engine.base import Engine, EngineSettings, SamplingParams

VERBS = ["generate", "abort", "sleep", "wake", "load_weights", "verify_weights", "close"]
ATTRIBUTES = ["index", "count", "max_running_requests", "version", "loop"]


def check_signatures(engine_class: type) -> None:
    """Checks that the class is an Engine and defines every verb with the parameters of Engine."""
    assert Engine in engine_class.__mro__
    assert sorted(VERBS) == sorted(Engine.__abstractmethods__)
    assert not inspect.isabstract(engine_class)
    assert list(inspect.signature(engine_class).parameters) == ["settings"]
    for verb in VERBS:
        own, promised = getattr(engine_class, verb), getattr(Engine, verb)
        assert own is not promised, f"{engine_class.__name__} does not define {verb}"
        assert inspect.signature(own) == inspect.signature(promised), verb
        assert inspect.iscoroutinefunction(own) == inspect.iscoroutinefunction(promised), verb


def check_attributes(engine: Engine, settings: EngineSettings) -> None:
    """Checks that a new engine has every attribute of Engine with a permitted value."""
    assert sorted(ATTRIBUTES) == sorted(Engine.__annotations__)
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


def plain_logps(model, prompt, tokens, temperature):
    """Returns the log-probabilities [tokens] of `tokens` after `prompt` by one plain forward."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def check_stop_strings(engine, prompts, tokenizer):
    """Checks where stop strings end greedy answers, also answers that go on after a pause.

    The string has three tokens of an answer. Every answer is the same with it, up to the first
    token that completes it, if it has one.
    """
    whole = play(engine, prompts, temperature=0.0, max_new_tokens=16)
    if not whole:
        return
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
    """Checks that the engine refuses the request with a ValueError that contains `message`."""
    try:
        play(engine, [prompt], **params)
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"{prompt} with {params} was not refused")
