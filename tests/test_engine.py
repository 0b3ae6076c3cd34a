"""Tests of the engine protocol with the embedded engine, of the engine table and the sampler."""

import asyncio
from importlib.metadata import PackageNotFoundError
from unittest import mock

import pytest
import torch
from common import make_model, make_tokenizer
from engine_contract import check_contract, make_prompts, play
from parity import worker_config
from serving import serving
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor

from rl2.config.engines import choose_engine
from rl2.engine import linear
from rl2.engine.base import EngineSettings, SamplingParams, check_request, default_max_running
from rl2.engine.local import LocalEngine
from rl2.engine.sampler import penalize_, sample_rows
from rl2.engine.server import ServerEngine
from rl2.engine.vllm_start import engine_arguments
from rl2.worker import Worker

CPU = torch.device("cpu")
PACKAGES = {"sglang", "vllm"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "llama")


def make_engine(name, dtype=torch.float32, **options):
    return LocalEngine(EngineSettings(name, dtype, CPU, **options))


@pytest.mark.parametrize(
    ("has_gpu", "installed", "expected"),
    [(True, PACKAGES, "sglang"), (True, {"vllm"}, "local"), (False, PACKAGES, "local")],
)
def test_auto_chooses_an_engine_that_has_been_tried(monkeypatch, has_gpu, installed, expected):
    def version(package):
        if package in installed:
            return "1.0"
        raise PackageNotFoundError(package)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr("importlib.metadata.version", version)
    assert choose_engine("auto")[0] == expected
    assert choose_engine("vllm")[0] == "vllm"


def test_vllm_takes_its_share_of_the_free_memory_of_a_gpu(llama, monkeypatch):
    """vLLM counts its share of the whole memory. A half of 60 GB that are free of 80 is 0.375."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60e9, 80e9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    settings = EngineSettings(
        llama, torch.bfloat16, torch.device("cuda", 0), gpu_memory_utilization=0.5, rank=1
    )
    model = AutoModelForCausalLM.from_pretrained(llama)
    arguments = engine_arguments(settings, model)
    assert arguments["gpu_memory_utilization"] == 0.375
    assert arguments["enable_sleep_mode"]
    assert (arguments["dtype"], arguments["seed"]) == ("bfloat16", 1)
    assert arguments["hf_overrides"] == {"head_dtype": "float32"}
    assert "kv_cache_memory_bytes" not in arguments


def to_tuples(generations):
    """The generations without their version, for comparison to the bit."""
    return [(out.tokens, out.logps, out.finish_reason) for out in generations]


@pytest.mark.parametrize(
    "family, tied, deterministic", [("llama", True, True), ("qwen2", False, False)]
)
def test_the_contract(device, tmp_path, family, tied, deterministic):
    name = make_model(tmp_path / "model", family, tied)
    options = {"deterministic": deterministic, "stop": ["some"]}
    settings = EngineSettings(name, torch.float32, CPU, max_running_requests=5, **options)
    actor = Worker(worker_config(name, lr=0.05, max_grad_norm=1.0), device, num_updates=8)
    engine = LocalEngine(settings)
    check_contract(engine, settings, actor, "the engine")
    engine.close()


def test_the_contract_of_servers(device, llama, tmp_path):
    """Two of them, that answer with a model of which one had other weights before."""
    shared = tmp_path / "shared"
    make_model(shared / "other", seed=1)
    with serving(
        llama, f"shared_dir={shared}", "dtype=float32", "max_running=5", count=2
    ) as servers:
        for server in servers[:1]:
            assert server.ask("/reload_weights", {"folder": "other", "version": 0})[0] == 200
        settings = EngineSettings(
            llama,
            torch.float32,
            CPU,
            max_running_requests=10,
            stop=["some"],
            server_urls=[server.url for server in servers],
            shared_dir=str(shared),
        )
        actor = Worker(worker_config(llama, lr=0.05, max_grad_norm=1.0), device, num_updates=8)
        engine = ServerEngine(settings)
        check_contract(engine, settings, actor, "the servers")
        engine.close()
    assert [path.name for path in shared.iterdir()] == ["other"], "weights are left behind"


@pytest.mark.parametrize("packed", [True, False])
def test_the_logits_are_fp32_whatever_the_dtype(llama, monkeypatch, packed):
    """Every logit equals the fp32 product of the bf16 hidden states and weights."""
    if not packed:
        monkeypatch.setattr(linear, "can_pack", lambda dtype: False)
    engine = make_engine(llama, torch.bfloat16, max_running_requests=4)
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16() * 20
    head = engine.model.get_output_embeddings()
    expected = hidden.double() @ head.weight.double().T
    logits = linear.head_logits(head, hidden)
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=2e-5)


def test_a_gpu_holds_no_weights_while_the_engine_sleeps(llama, monkeypatch):
    """With a CPU that calls itself a GPU."""
    engine = make_engine(llama, max_running_requests=3)
    weights = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
    expected = to_tuples(play(engine, make_prompts(3), max_new_tokens=5))
    for weight in engine.model.parameters():  # out of the file's memory, as a copy to a GPU is
        weight.data = weight.data.clone()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(engine, "device", torch.device("cuda", 0))
    engine.sleep()
    assert not any(weight.untyped_storage().nbytes() for weight in engine.model.parameters())
    assert not engine.cache.layers
    with pytest.raises(AssertionError, match="incomplete"):
        play(engine, make_prompts(3), max_new_tokens=5)
    engine.wake()
    monkeypatch.setattr(engine, "device", CPU)
    engine.load_weights(weights.items(), 1)
    assert to_tuples(play(engine, make_prompts(3), max_new_tokens=5)) == expected


@pytest.mark.parametrize(
    ("kind", "device", "expected"),
    [("vllm", "cuda", 256), ("sglang", "cpu", 64), ("local", "cuda", 64)],
)
def test_an_engine_decodes_as_many_sequences_as_its_device_likes(kind, device, expected):
    assert default_max_running(kind, torch.device(device)) == expected


def test_stop_strings_end_sampled_answers_with_the_token_that_completes_one(llama):
    """The answers are those without stop strings, cut; a stop token may come first."""
    stops = ("a", "Qz", "<|im_end|>")
    engine = make_engine(llama, stop=stops)
    tokenizer = make_tokenizer()
    prompts = make_prompts(60, 10)
    whole = play(engine, prompts, max_new_tokens=40, stop_token_ids=(30,))
    reasons = set()
    cut = play(engine, prompts, max_new_tokens=40, stop_token_ids=(30,), stop=stops)
    for out, long in zip(cut, whole, strict=True):
        texts = [tokenizer.decode(long.tokens[: n + 1]) for n in range(len(long.tokens))]
        ends = [n for n, text in enumerate(texts, 1) if any(stop in text for stop in stops)]
        length = min([*ends, len(texts)])
        assert (out.tokens, out.logps) == (long.tokens[:length], long.logps[:length])
        assert out.finish_reason == ("stop" if ends else long.finish_reason)
        reasons.add((out.finish_reason, bool(ends)))
    assert reasons == {("stop", True), ("stop", False), ("length", False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_requests_change_no_bit_when_deterministic(llama, dtype):
    """An answer has the same bits alone and with others, in any order and in any slot."""
    engine = make_engine(llama, dtype, max_running_requests=5)
    prompts = make_prompts(13)
    params = {"max_new_tokens": 80, "stop_token_ids": (10, 11)}
    seeds = [(3, i) for i in range(13)]
    together = to_tuples(play(engine, prompts, seeds, **params))
    reverse_order = to_tuples(play(engine, prompts[::-1], seeds[::-1], **params))[::-1]
    assert together == reverse_order
    for number in (0, 5, 12):
        [alone] = to_tuples(play(engine, [prompts[number]], [seeds[number]], **params))
        assert alone == together[number]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_free_slot_is_refilled_before_the_next_step(llama, monkeypatch, deterministic):
    """There are two slots. One answer of 8 tokens and 7 answers of one token take 8 steps."""
    engine = make_engine(llama, max_running_requests=2, deterministic=deterministic)
    step = mock.Mock(wraps=engine._step)
    monkeypatch.setattr(engine, "_step", step)

    async def generate_all():
        lengths = [8] + [1] * 7
        calls = [
            engine.generate([5, 6], SamplingParams(max_new_tokens=length), (0, i))
            for i, length in enumerate(lengths)
        ]
        assert [len(out.tokens) for out in await asyncio.gather(*calls)] == lengths

    engine.loop.run_until_complete(generate_all())
    assert step.call_count == 8


def test_wrong_weights_are_refused_and_the_engine_does_not_generate_after_them(llama):
    """test_lora.py has names that are unknown or missing."""
    engine = make_engine(llama)
    weights = dict(AutoModelForCausalLM.from_pretrained(llama).named_parameters())
    wrong_shape = weights | {"model.norm.weight": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"model.norm.weight is \[5\], expected \[32\]"):
        engine.load_weights(wrong_shape.items(), 1)
    with pytest.raises(AssertionError, match="incomplete"):
        play(engine, [[5]], max_new_tokens=1)
    engine.load_weights(weights.items(), 2)
    assert play(engine, [[5]], max_new_tokens=1)[0].version == 2


@pytest.mark.parametrize("cancelled", [0, 1])
def test_a_cancelled_request_frees_its_slot_or_its_place(llama, cancelled):
    """Two have slots, one waits for its turn, and one of two that wait with the same prompt."""
    engine = make_engine(llama, max_running_requests=2)
    seeds = [(5, 0), (5, 1)]
    expected = to_tuples(play(engine, [[9, 8]] * 2, seeds, max_new_tokens=5))

    async def cancel_all_but_one():
        long = SamplingParams(max_new_tokens=400)
        short = SamplingParams(max_new_tokens=5)
        tasks = [asyncio.ensure_future(engine.generate([5], long, (0, i))) for i in range(3)]
        await asyncio.sleep(0.05)
        pair = [asyncio.ensure_future(engine.generate([9, 8], short, seed)) for seed in seeds]
        while len(engine.waiting) < 3:
            await asyncio.sleep(0)
        for task in [*tasks, pair[cancelled]]:
            task.cancel()
        return await asyncio.gather(*pair, return_exceptions=True)

    results = engine.loop.run_until_complete(cancel_all_but_one())
    assert isinstance(results.pop(cancelled), asyncio.CancelledError)
    assert to_tuples(results) == [expected[1 - cancelled]]
    assert not engine._unfinished() and not engine.prompts


def test_diverged_weights_raise_in_every_request(llama):
    engine = make_engine(llama, max_running_requests=2)
    expected = to_tuples(play(engine, [[5, 6]], max_new_tokens=3))
    weights = dict(AutoModelForCausalLM.from_pretrained(llama).named_parameters())
    nans = {name: torch.full_like(weight, float("nan")) for name, weight in weights.items()}
    engine.load_weights(nans.items(), 1)

    async def generate_all():
        params = SamplingParams(max_new_tokens=3)
        calls = [engine.generate([5], params, (0, i)) for i in range(4)]
        return await asyncio.gather(*calls, return_exceptions=True)

    errors = engine.loop.run_until_complete(generate_all())
    assert all(isinstance(error, RuntimeError) and "diverged" in str(error) for error in errors)
    engine.load_weights(weights.items(), 2)
    assert to_tuples(play(engine, [[5, 6]], max_new_tokens=3)) == expected


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([5, 98], {}, "5 to 98: the vocabulary is 0 to 97"),
        ([-1], {}, "vocabulary"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([5], {"max_new_tokens": None}, "max_new_tokens=None"),
        ([5], {"temperature": -1.0}, "temperature=-1"),
        ([5], {"temperature": float("nan")}, "temperature=nan"),
        ([5], {"top_p": 0.0}, "top_p=0.0"),
        ([5], {"top_k": 0}, "top_k=0"),
        ([5], {"min_p": 1.0}, "min_p=1.0"),
        ([5], {"min_p": float("nan")}, "min_p=nan"),
        ([5], {"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ([5], {"frequency_penalty": float("nan")}, "frequency and presence penalty nan and 0.0"),
        ([5], {"presence_penalty": 2.5}, "frequency and presence penalty 0.0 and 2.5"),
    ],
)
def test_an_impossible_request_is_refused(prompt, params, message):
    with pytest.raises(ValueError, match=message):
        check_request(prompt, SamplingParams(**{"max_new_tokens": 3, **params}), 98, 512)


def draw(logits, noise, temperature=1.0, **params):
    """A token of one row of logits for each noise."""
    num = len(noise)
    params = SamplingParams(temperature, **params)
    return sample_rows(logits.expand(num, -1), noise.tolist(), [params] * num)


@pytest.mark.parametrize("vocabulary", [5, 64, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_softmax(vocabulary, temperature):
    """With evenly spaced noise, the counts of tokens are proportional to their probabilities.

    The tolerance is one count at each end of a token's interval.
    """
    torch.manual_seed(0)
    logits = torch.randn(vocabulary) * 2
    num = 20_000
    noise = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    tokens, logps, _ = draw(logits, noise, temperature)
    expected = (logits.double() / temperature).log_softmax(-1)
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert ((counts - expected.exp() * num).abs() <= 2).all()
    torch.testing.assert_close(logps.double(), expected[tokens], rtol=0, atol=1e-5)


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-53])
def test_extreme_noise_never_samples_a_token_of_probability_zero(noise):
    logits = torch.full((200,), -torch.inf)
    logits[70:72] = 0.0
    (token,), *_ = draw(logits, torch.tensor([noise], dtype=torch.float64))
    assert token in (70, 71)


@pytest.mark.parametrize("with_candidates", [False, True])
def test_top_p_top_k_and_min_p_restrict_tokens_and_on_request_logps(with_candidates):
    whole = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    noise = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    for settings, allowed in (
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.7}, {1, 3}),
        ({"top_p": 0.71}, {1, 3, 4}),
        ({"top_p": 1e-6}, {1}),
        ({"top_k": 3, "top_p": 0.5}, {1, 3}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.999}, {1}),
        ({"min_p": 0.74}, {1, 3}),
        ({"min_p": 0.26}, {1, 3, 4}),
        ({"min_p": 0.1}, {0, 1, 2, 3, 4}),
        # Each looks at the whole distribution: 0.7 of it is 0.82 of what min_p leaves.
        ({"min_p": 0.3, "top_p": 0.71}, {1, 3, 4}),
        ({"min_p": 0.3, "top_p": 0.7, "top_k": 3}, {1, 3}),
        ({"min_p": 0.3, "temperature": 0.5}, {1, 3}),
    ):
        tokens, logps, candidates = draw(
            whole.log(), noise, **settings, with_candidates=with_candidates
        )
        assert set(tokens.tolist()) == allowed, settings
        probs = (whole.log() / settings.get("temperature", 1.0)).softmax(-1)
        share = sum(probs[token] for token in allowed) if with_candidates else 1.0
        torch.testing.assert_close(logps, (probs[tokens] / share).log(), rtol=0, atol=1e-5)
        assert len(candidates) == (1000 if with_candidates else 0)
        for ids in candidates.values():
            assert set(ids.tolist()) == allowed
        frequencies = torch.bincount(tokens, minlength=5)[sorted(allowed)] / 1000
        allowed_probs = probs[sorted(allowed)]
        expected = allowed_probs / allowed_probs.sum()
        torch.testing.assert_close(frequencies, expected, rtol=0, atol=2e-3)


def test_penalties_of_a_request_change_no_other_answer(llama):
    """The penalty for repetition is that of transformers, and answers have the same bits alone."""
    prompts = [[5, 6, 7], [5, 6, 7], [8, 9] * 20, [30]]
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": -0.5, "presence_penalty": 0.25}
    params = [SamplingParams(max_new_tokens=30, **kinds) for kinds in ({}, penalties) * 2]
    engine = make_engine(llama, max_running_requests=20)

    def answer(numbers):
        async def generate_all():
            calls = [engine.generate(prompts[i], params[i], (0, i)) for i in numbers]
            return await asyncio.gather(*calls)

        return to_tuples(engine.loop.run_until_complete(generate_all()))

    together = answer(range(4))
    assert together == [answer([i])[0] for i in range(4)]
    params = [SamplingParams(max_new_tokens=30)] * 4
    plain = answer(range(4))
    assert [a == b for a, b in zip(plain, together, strict=True)] == [True, False] * 2
    logits = torch.randn(50) * 3
    expected = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[5, 6, 6, 7]]), logits[None])[0]
    penalize_(logits, [5, 6], [6, 7], SamplingParams(repetition_penalty=1.5))
    torch.testing.assert_close(logits, expected)
