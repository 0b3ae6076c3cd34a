"""The engine's contract on the embedded engine, the choice of engines, and the sampler."""

import asyncio
import importlib

import pytest
import torch
from common import make_model
from engine_contract import check_attributes, check_signatures, plain_logps, play
from transformers import AutoModelForCausalLM

from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.local import LocalEngine
from rl2.engine.sampler import sample
from rl2.engine.select import ENGINES, make_engine

CPU = torch.device("cpu")
FAMILIES = [("llama", True), ("qwen2", False), ("qwen3", True)]


@pytest.fixture(scope="module", params=FAMILIES, ids=[family for family, _ in FAMILIES])
def name(request, tmp_path_factory):
    family, tied = request.param
    return make_model(tmp_path_factory.mktemp("model") / family, family, tied)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "llama")


def make(name, dtype=torch.float32, **options):
    return LocalEngine(EngineSettings(name, dtype, CPU, **options))


def make_prompts(count, longest=90, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, 98, (n,), generator=generator).tolist() for n in lengths]


def bits(generations):
    return [(g.tokens, g.logps, g.finish_reason) for g in generations]


@pytest.mark.parametrize("kind", ENGINES)
def test_every_engine_has_the_verbs_of_the_protocol(kind):
    module, class_name = ENGINES[kind].split(":")
    check_signatures(getattr(importlib.import_module(module), class_name))


def test_the_attributes_of_the_protocol(llama):
    settings = EngineSettings(
        model_name=llama,
        dtype=torch.float32,
        device=CPU,
        max_running_requests=3,
        rank=2,
        world_size=4,
    )
    engine = LocalEngine(settings)
    check_attributes(engine, settings)
    assert (engine.index, engine.count) == (2, 4)
    engine.close()


ECHO_ENGINE = """
import asyncio

from rl2.engine.base import Engine, Generation


class EchoEngine(Engine):
    def __init__(self, settings):
        self.index = settings.rank
        self.count = settings.world_size
        self.max_running_requests = settings.max_running_requests
        self.version = 0
        self.loop = asyncio.new_event_loop()

    async def generate(self, prompt, params, seed):
        return Generation(prompt, [0.0] * len(prompt), "length", self.version)

    def abort(self):
        pass

    def sleep(self):
        pass

    def wake(self):
        pass

    def load_weights(self, named_tensors, version):
        self.version = version

    def verify_weights(self, named_tensors, version):
        self.version = version

    def close(self):
        self.loop.close()
"""


def test_a_new_engine_is_one_file_and_one_line_of_the_table(tmp_path, monkeypatch, capsys):
    (tmp_path / "echo_engine.py").write_text(ECHO_ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ENGINES, "echo", "echo_engine:EchoEngine")
    settings = EngineSettings(model_name="", dtype=torch.float32, device=CPU)
    engine = make_engine("echo", settings)
    assert capsys.readouterr().out == "rollout engine: echo, as rollout.engine says\n"
    check_attributes(engine, settings)
    engine.load_weights([], 5)
    (out,) = play(engine, [[7, 8]], max_new_tokens=2)
    assert (out.tokens, out.version) == ([7, 8], 5)
    engine.close()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logps_are_those_of_a_plain_forward(name, deterministic, temperature):
    engine = make(name, max_running_requests=5, deterministic=deterministic)
    model = AutoModelForCausalLM.from_pretrained(name)
    prompts = make_prompts(12)
    generations = play(engine, prompts, temperature=temperature, max_new_tokens=90)
    for prompt, out in zip(prompts, generations, strict=True):
        expected = plain_logps(model, prompt, out.tokens, temperature)
        torch.testing.assert_close(torch.tensor(out.logps), expected, rtol=0, atol=1e-4)
    engine.close()


@pytest.mark.parametrize("deterministic", [True, False])
def test_greedy_is_what_generate_says(name, deterministic):
    engine = make(name, max_running_requests=3, deterministic=deterministic)
    model = AutoModelForCausalLM.from_pretrained(name)
    prompts = make_prompts(7)
    greedy = play(engine, prompts, temperature=0.0, max_new_tokens=12, stop_token_ids=(2,))
    for prompt, out in zip(prompts, greedy, strict=True):
        tokens = torch.tensor([prompt])
        expected = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=12
        )
        assert out.tokens == expected[0, len(prompt) :].tolist()
    only_one = play(engine, prompts, temperature=0.7, top_k=1, max_new_tokens=12)
    assert only_one[0].tokens[:3] == greedy[0].tokens[:3]
    engine.close()


def test_a_stop_token_ends_and_is_kept(llama):
    engine = make(llama)
    prompts = make_prompts(40, 10)
    stops = tuple(range(3, 40))
    for out in play(engine, prompts, max_new_tokens=6, stop_token_ids=stops):
        stopped = out.tokens[-1] in stops
        assert out.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(out.tokens) == 6
        assert not set(out.tokens[:-1]) & set(stops) and len(out.logps) == len(out.tokens)
    engine.close()


def test_a_seed_is_a_sample(llama):
    engine, prompt = make(llama), [5, 6, 7]
    first = play(engine, [prompt] * 6, max_new_tokens=20)
    assert len({tuple(out.tokens) for out in first}) == 6, "the samples of a group are the same"
    assert bits(play(engine, [prompt] * 6, max_new_tokens=20)) == bits(first)
    longer = play(engine, [prompt] * 6, max_new_tokens=25)
    assert [out.tokens[:20] for out in longer] == [out.tokens for out in first], (
        "the noise of a token moved"
    )
    assert play(engine, [prompt], seeds=[(1, 0)], max_new_tokens=20)[0].tokens != first[0].tokens
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_changes_no_bit_when_deterministic(name, dtype):
    """Alone, among others, in another order, in another slot and after others have left: the same
    bits.
    """
    engine, prompts = make(name, dtype, max_running_requests=5), make_prompts(13)
    params = {"max_new_tokens": 80, "stop_token_ids": (10, 11)}
    seeds = [(3, i) for i in range(13)]
    together = bits(play(engine, prompts, seeds, **params))
    backwards = bits(play(engine, prompts[::-1], seeds[::-1], **params))[::-1]
    alone = [
        bits(play(engine, [prompt], [seed], **params))[0]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert together == backwards == alone
    engine.close()


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_free_slot_is_refilled_before_the_next_step(llama, monkeypatch, deterministic):
    """One answer of 8 tokens holds a slot while 7 answers of one token pass through the other: 8
    steps in all.
    """
    engine, steps = make(llama, max_running_requests=2, deterministic=deterministic), []
    step = engine._step
    monkeypatch.setattr(engine, "_step", lambda: (steps.append(1), step()))

    async def all_():
        lengths = [8] + [1] * 7
        calls = [
            engine.generate([5, 6], SamplingParams(max_new_tokens=n), (0, i))
            for i, n in enumerate(lengths)
        ]
        assert [len(out.tokens) for out in await asyncio.gather(*calls)] == lengths

    engine.loop.run_until_complete(all_())
    assert len(steps) == 8
    engine.close()


def test_a_groups_prompt_is_prefilled_once(llama, monkeypatch):
    engine, seen = make(llama, max_running_requests=3), []
    prefill = engine._prefill
    monkeypatch.setattr(
        engine,
        "_prefill",
        lambda prompts: (seen.extend(p.tokens for p in prompts), prefill(prompts)),
    )
    first, second = list(range(5, 25)), list(range(30, 60))
    play(engine, [first] * 7 + [second] * 5, max_new_tokens=4)
    assert seen == [tuple(first), tuple(second)]
    assert not engine.prompts, "keys and values of a prompt that nobody waits for are still held"
    engine.close()


def test_a_prompt_of_one_token(llama):
    engine, model = make(llama), AutoModelForCausalLM.from_pretrained(llama)
    (out,) = play(engine, [[5]], max_new_tokens=8)
    torch.testing.assert_close(
        torch.tensor(out.logps), plain_logps(model, [5], out.tokens, 1.0), rtol=0, atol=1e-4
    )
    engine.close()


def test_load_changes_the_answers_and_the_version(name, tmp_path):
    family = name.rsplit("/", 1)[1]
    other = make_model(tmp_path / "other", family, dict(FAMILIES)[family], seed=1)
    engine, fresh = make(name), make(other)
    prompts = make_prompts(5)
    before = play(engine, prompts, max_new_tokens=8)
    expected = play(fresh, prompts, max_new_tokens=8)
    model = AutoModelForCausalLM.from_pretrained(other)
    engine.load_weights(model.named_parameters(), 7)  # a tied head comes once
    after = play(engine, prompts, max_new_tokens=8)
    assert bits(after) == bits(expected) != bits(before)
    assert {out.version for out in before} == {0} and {out.version for out in after} == {7}
    engine.close()
    fresh.close()


def test_verify_weights_names_the_weights_that_differ(llama):
    engine, model = make(llama), AutoModelForCausalLM.from_pretrained(llama)
    engine.verify_weights(model.named_parameters(), 0)
    weights = {key: tensor.detach().clone() for key, tensor in model.named_parameters()}
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] += 1e-6
    with pytest.raises(RuntimeError, match=r"1 weights .*model\.layers\.1\.mlp\.up_proj"):
        engine.verify_weights(weights.items(), 0)
    engine.load_weights(weights.items(), 1)
    engine.verify_weights(weights.items(), 1)
    engine.close()


def test_an_incomplete_load_is_refused_and_so_is_generating_after_it(llama):
    engine = make(llama)
    weights = dict(AutoModelForCausalLM.from_pretrained(llama).named_parameters())
    some = dict(list(weights.items())[:3])
    for bad, message in (
        ({**weights, "model.nothing": torch.zeros(1)}, "model.nothing is unknown"),
        (
            {**weights, "model.norm.weight": torch.zeros(5)},
            r"model.norm.weight is \[5\], expected \[32\]",
        ),
        (some, "weights did not arrive"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_weights(bad.items(), 1)
        with pytest.raises(AssertionError, match="incomplete"):
            play(engine, [[5]], max_new_tokens=1)
    engine.load_weights(weights.items(), 2)
    assert play(engine, [[5]], max_new_tokens=1)[0].version == 2
    engine.close()


def test_sleep_gives_memory_back_and_wake_goes_on(llama):
    engine, prompts = make(llama), make_prompts(4)
    before = bits(play(engine, prompts, max_new_tokens=8))
    engine.sleep()
    assert engine.cache is None
    with pytest.raises(AssertionError, match="sleeping"):
        play(engine, prompts, max_new_tokens=8)
    engine.wake()
    assert bits(play(engine, prompts, max_new_tokens=8)) == before
    engine.close()


def test_a_request_that_is_given_up_frees_its_slot(llama):
    engine = make(llama, max_running_requests=2)
    expected = bits(play(engine, [[9, 8]] * 2, [(5, 0), (5, 1)], max_new_tokens=5))

    async def all_():
        running = [
            asyncio.ensure_future(engine.generate([5], SamplingParams(max_new_tokens=400), (0, i)))
            for i in range(3)
        ]
        await asyncio.sleep(0.05)  # two have slots, one waits
        for task in running:
            task.cancel()
        return await asyncio.gather(
            *(engine.generate([9, 8], SamplingParams(max_new_tokens=5), (5, i)) for i in range(2))
        )

    assert bits(engine.loop.run_until_complete(all_())) == expected
    assert not engine.in_flight and not engine.prompts
    engine.close()


def test_abort_returns_what_there_is(llama):
    """Running, waiting and sharing a prompt: each gets the beginning of what it would have got, and
    can go on from it.
    """
    engine = make(llama, max_running_requests=2)
    whole = play(engine, [[5, 6]] * 3 + [[7]], max_new_tokens=60)

    async def all_():
        params = SamplingParams(max_new_tokens=60)
        prompts = [[5, 6]] * 3 + [[7]]
        calls = [engine.generate(prompt, params, (0, i)) for i, prompt in enumerate(prompts)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        while len(engine.slots[0].tokens if engine.slots[0] else ()) < 5:
            await asyncio.sleep(0)
        engine.abort()
        return await asyncio.gather(*tasks)

    generations = engine.loop.run_until_complete(all_())
    assert [out.finish_reason for out in generations] == ["abort"] * 4
    assert [len(out.tokens) for out in generations] == [5, 5, 0, 0]
    for part, out in zip(generations, whole, strict=True):
        assert bits([part])[0][:2] == (out.tokens[: len(part.tokens)], out.logps[: len(part.logps)])
    assert not engine.in_flight and not engine.prompts
    engine.abort()  # nothing is in flight
    assert bits(play(engine, [[5, 6]] * 3 + [[7]], max_new_tokens=60)) == bits(whole)
    engine.close()


def test_diverged_weights_raise_in_every_request(llama):
    engine, good = make(llama, max_running_requests=2), AutoModelForCausalLM.from_pretrained(llama)
    expected = bits(play(engine, [[5, 6]], max_new_tokens=3))
    bad = {name: torch.full_like(weight, float("nan")) for name, weight in good.named_parameters()}
    engine.load_weights(bad.items(), 1)

    async def all_():
        calls = [engine.generate([5], SamplingParams(max_new_tokens=3), (0, i)) for i in range(4)]
        return await asyncio.gather(*calls, return_exceptions=True)

    errors = engine.loop.run_until_complete(all_())
    assert all(isinstance(error, RuntimeError) and "diverged" in str(error) for error in errors)
    engine.load_weights(good.named_parameters(), 2)
    assert bits(play(engine, [[5, 6]], max_new_tokens=3)) == expected
    engine.close()


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], {}, "no tokens"),
        ([5, 98], {}, "5 to 98: the vocabulary is 0 to 97"),
        ([-1], {}, "vocabulary"),
        ([5] * 510, {}, "510 .* exceeds 512"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([5], {"max_new_tokens": None}, "max_new_tokens=None"),
        ([5], {"temperature": -1.0}, "temperature=-1"),
        ([5], {"temperature": float("nan")}, "temperature=nan"),
        ([5], {"top_p": 0.0}, "top_p=0.0"),
        ([5], {"top_k": 0}, "top_k=0"),
    ],
)
def test_what_can_never_be_answered_is_refused(llama, prompt, params, message):
    engine = make(llama)
    with pytest.raises(ValueError, match=message):
        play(engine, [prompt], **{"max_new_tokens": 3, **params})
    engine.close()


def test_unknown_sampling_parameters_are_refused():
    with pytest.raises(TypeError, match="topk"):
        SamplingParams(topk=1)


def draw(logits, noise, temperature=1.0, top_p=1.0, top_k=-1):
    """The token and log-probability of one row of logits for each noise."""
    num = len(noise)
    settings = [torch.full((num,), x) for x in (temperature, top_p, top_k)]
    return sample(logits.expand(num, -1), noise, *settings)


@pytest.mark.parametrize("vocabulary", [5, 64, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampling_is_the_softmax(vocabulary, temperature):
    """Evenly spaced noise must meet each token as often as its probability says, to one count at
    each of its ends.
    """
    torch.manual_seed(0)
    logits, num = torch.randn(vocabulary) * 2, 20_000
    noise = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    tokens, logps = draw(logits, noise, temperature)
    expected = (logits.double() / temperature).log_softmax(-1)
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert ((counts - expected.exp() * num).abs() <= 2).all()
    torch.testing.assert_close(logps.double(), expected[tokens], rtol=0, atol=1e-5)


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-53])
def test_the_ends_of_the_noise_never_draw_what_has_no_probability(noise):
    logits = torch.full((200,), -torch.inf)
    logits[70:72] = 0.0
    (token,), _ = draw(logits, torch.tensor([noise], dtype=torch.float64))
    assert token in (70, 71)


def test_top_p_and_top_k_restrict_and_logps_stay_whole():
    probs = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    noise = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    for settings, kept in (
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.7}, {1, 3}),
        ({"top_p": 0.71}, {1, 3, 4}),
        ({"top_p": 1e-6}, {1}),
        ({"top_k": 3, "top_p": 0.5}, {1, 3}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
    ):
        tokens, logps = draw(probs.log(), noise, **settings)
        assert set(tokens.tolist()) == kept, settings
        torch.testing.assert_close(logps, probs.log()[tokens], rtol=0, atol=1e-5)
        shares = torch.bincount(tokens, minlength=5)[sorted(kept)] / 1000
        mass = probs[sorted(kept)]
        torch.testing.assert_close(shares, mass / mass.sum(), rtol=0, atol=2e-3)
