"""rollout.exact: the engine and the trainer give all sampled tokens equal log-probabilities."""

import asyncio
import re
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from common import SPECIAL, launch_runs, letter_run, make_model, read_metrics
from configs import BASE
from engine_contract import play
from parity import policy_loss, worker_config
from scripted import process_group  # noqa: F401

from rl2.attention import pages as pages_module
from rl2.attention.pages import attend_pages, exact_factors, queries_are_independent
from rl2.batch import Sample, collate
from rl2.config.arguments import read_arguments
from rl2.config.conditions import Exactness, choose_exactness, exact_obstacles
from rl2.config.parse import compose
from rl2.config.schema import PPOConfig
from rl2.engine import local
from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.local import LocalEngine
from rl2.rollout.trajectory import append_tokens
from rl2.worker import Worker

CPU = torch.device("cpu")
# Large enough that kernels for few and for many rows, and for packed weights, differ in fp32.
SHAPE = {
    "vocab_size": 1003,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
# Around the ends of pages, and less than a kernel's rows.
PROMPT_LENGTHS = (1, 3, 5, 63, 64, 65, 130)
GROUP_SIZE = 4
FAMILIES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "gemma2 with capped logits": (
        "gemma2",
        {**SPECIAL["gemma2"], "sliding_window": 40, "query_pre_attn_scalar": 32},
    ),
    # Each query head has a key head of its own.
    "phi with a biased head": ("phi", {"tie_word_embeddings": False, "num_key_value_heads": 6}),
}
if "granite_swa" in SPECIAL:
    sinks = {**SPECIAL["granite_swa"], "sliding_window": 40}
    FAMILIES["granite_swa with sinks"] = ("granite_swa", sinks)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The path of each model of FAMILIES by name, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def find(name):
        family, overrides = FAMILIES[name]
        settings = {**SHAPE, "initializer_range": 0.1, **overrides}
        return make_model(folder / name.replace(" ", "_"), family, **settings)

    return find


def skip_if_bits_depend_on_the_row_count(dtype):
    """Skips on a CPU whose kernels let a row's bits depend on the number of rows in its call.

    There a run with rollout.exact stops at its first step, see docs/proofs.md.
    """
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = SHAPE["hidden_size"], SHAPE["vocab_size"]
    rows = torch.randn(400, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    if not queries_are_independent(dtype):
        pytest.skip("this CPU attends to one query and to many in other orders")
    for n in (16, 24, 160):
        with exact_factors(dtype):  # of the head
            logits = F.linear(rows[:n].float(), weight.float())
            is_same = torch.equal(logits, F.linear(rows.float(), weight.float())[:n])
        if not (is_same and torch.equal(F.linear(rows[:n], weight), F.linear(rows, weight)[:n])):
            pytest.skip(f"this CPU sums {n} rows in another order than 400")


def make_pair(name, dtype, exact=True, **changes):
    """An engine and a worker with the same weights. The engine applies adapters."""
    torch.manual_seed(0)
    exactness = Exactness.DEMANDED if exact else Exactness.OFF
    config = worker_config(name, dtype=dtype, **{"lr": 1e-3, **changes})
    worker = Worker(config, CPU, num_updates=4, exactness=exactness)
    options = {"max_running_requests": 24, "exact": exact}
    if config.lora_rank:
        options["adapters"] = config
    engine = LocalEngine(EngineSettings(name, getattr(torch, dtype), CPU, **options))
    if config.lora_rank:
        engine.load_weights(worker.iter_trained_weights(worker.dtype), 0)
    return engine, worker


def roll_out(engine, temperature=1.0, seed=0, **params):
    """A batch of GROUP_SIZE answers to each of some prompts, with advantages."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(3, 98, (length,), generator=generator).tolist()
        prompts += [prompt] * GROUP_SIZE
    seeds = [(seed, i) for i in range(len(prompts))]
    answers = play(engine, prompts, seeds, temperature=temperature, max_new_tokens=9, **params)
    samples = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        sample = Sample((), (), (), (), i // GROUP_SIZE, i)
        append_tokens(sample, prompt)
        append_tokens(sample, answer.tokens, answer.logps, answer.candidates)
        samples.append(sample)
    batch = collate(samples)
    batch.advantages = torch.randn(batch.mask.shape, generator=generator) * batch.mask
    batch.token_weights = batch.mask / batch.mask.sum()
    return batch


def difference(batch, worker, temperature=1.0) -> float:
    """The largest difference of the engine's and the worker's log-probabilities."""
    logps = worker.score(batch, temperature).logps
    return ((logps - batch.engine_logps) * batch.mask).abs().max().item()


CASES = [  # (family, dtype, temperature, keys of the worker)
    ("llama", "bfloat16", 1.0, {}),
    ("llama", "float32", 1.0, {}),
    ("qwen3", "bfloat16", 0.7, {}),
    ("qwen3", "float32", 1.3, {"share_prompts": False, "max_length_per_device": 200}),
    ("qwen2", "float32", 1.0, {}),
    ("gemma2 with capped logits", "bfloat16", 1.0, {}),
    ("phi with a biased head", "float32", 1.0, {}),
    ("granite_swa with sinks", "bfloat16", 1.0, {}),
    ("qwen2", "bfloat16", 1.0, {"lora_rank": 1, "share_prompts": False}),
    (
        "gemma2 with capped logits",
        "float32",
        1.0,
        {"lora_rank": 2, "gradient_checkpointing": True, "max_length_per_device": 200},
    ),
    ("qwen3", "float32", 1.0, {"lora_rank": 16, "lora_targets": ["q_proj", "down_proj"]}),
]


@pytest.mark.parametrize(
    "family, dtype, temperature, changes", [case for case in CASES if case[0] in FAMILIES]
)
def test_log_probabilities_are_equal_before_and_after_updates(
    models, family, dtype, temperature, changes
):
    check_log_probabilities(models(family), dtype, temperature, changes)


@pytest.mark.nightly  # two threads wait for each other while other tests run
@pytest.mark.parametrize("family, dtype, temperature, changes", [CASES[0], CASES[3]])
def test_two_threads_divide_all_products_alike(models, family, dtype, temperature, changes):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_log_probabilities(models(family), dtype, temperature, changes)
    finally:
        torch.set_num_threads(before)


def check_log_probabilities(name, dtype, temperature, changes):
    """The update compares too: without old log-probabilities it would stop."""
    skip_if_bits_depend_on_the_row_count(getattr(torch, dtype))
    if "lora_rank" in changes:
        changes = {**changes, "lr": 1e-2}
    engine, worker = make_pair(name, dtype, **changes)
    for version in range(1, 3 if "lora_rank" in changes else 2):  # A moves in the second update
        batch = roll_out(engine, temperature, seed=version)
        assert batch.mask.sum() == len(PROMPT_LENGTHS) * GROUP_SIZE * 9
        assert difference(batch, worker, temperature) == 0
        worker.update(batch, policy_loss, temperature, with_entropy=True)
        engine.sleep()
        engine.wake()
        weights = worker.iter_full_weights
        if "lora_rank" in changes:
            weights = worker.iter_trained_weights
        engine.load_weights(weights(worker.dtype), version)
    newest = roll_out(engine, temperature, seed=9)
    assert difference(newest, worker, temperature) == 0
    small = newest.select([0])  # a prompt of one token, of whose answer three tokens are trained
    small.mask[:, 3:] = 0
    assert difference(small, worker, temperature) == 0
    engine.close()
    with pytest.raises(RuntimeError, match="log-probabilities are not equal"):
        worker.score(batch, temperature)  # of the weights before the update


@pytest.mark.parametrize("params", [{"top_p": 0.8, "top_k": 500}, {"min_p": 0.1}])
def test_they_are_equal_among_what_is_left_to_draw_from(models, params):
    """The same answers have other log-probabilities among all tokens."""
    engine, worker = make_pair(models("llama"), "float32")
    batch = roll_out(engine, 0.7, **params, with_candidates=True)
    assert difference(batch, worker, 0.7) == 0
    worker.update(batch, policy_loss, 0.7, with_entropy=True)
    engine.close()
    engine, worker = make_pair(models("llama"), "float32")
    whole = roll_out(engine, 0.7, **params)
    assert torch.equal(whole.tokens, batch.tokens) and whole.candidates is None
    assert difference(whole, worker, 0.7) == 0
    assert (batch.engine_logps >= whole.engine_logps).all()
    assert (batch.engine_logps - whole.engine_logps).max() > 0.05
    engine.close()


def test_free_slots_and_common_prefills_change_no_bit(models, monkeypatch):
    """Answers of uneven lengths in steps of all slots, and in steps of the busy ones.

    With constant shapes each of the five prompts is prefilled alone.
    """
    skip_if_bits_depend_on_the_row_count(torch.float32)
    prompts = [list(range(3, 10 + i % 5)) for i in range(60)]
    settings = EngineSettings(
        models("llama"), torch.float32, CPU, max_running_requests=40, exact=True
    )
    results, rows, num_prefills = [], [], []
    for has_constant_shapes in (True, False):
        engine = LocalEngine(settings)
        assert not engine.shapes.constant
        engine.shapes = replace(engine.shapes, constant=has_constant_shapes)
        decode, prefill = mock.Mock(wraps=engine._decode), mock.Mock(wraps=engine._prefill)
        monkeypatch.setattr(engine, "_prefill", prefill)
        monkeypatch.setattr(engine, "_decode", decode)
        params = [SamplingParams(max_new_tokens=1 + i * 7 % 30) for i in range(60)]
        calls = [engine.generate(p, params[i], (0, i)) for i, p in enumerate(prompts)]

        async def answer_all(calls=calls):
            return await asyncio.gather(*calls)

        answers = engine.loop.run_until_complete(answer_all())
        results.append([(answer.tokens, answer.logps) for answer in answers])
        rows.append([len(call.args[0]) for call in decode.call_args_list])
        num_prefills.append(prefill.call_count)
        engine.close()
    assert results[0] == results[1]
    assert num_prefills == [5, 1]
    assert set(rows[0]) == {40}
    assert min(rows[1]) == 16 and max(rows[1]) == 40 and sum(rows[1]) < 0.8 * sum(rows[0])


def test_free_slots_are_decoded_where_rows_depend_on_their_number(models, monkeypatch):
    name = models("qwen2")
    settings = EngineSettings(name, torch.float32, CPU, max_running_requests=24, exact=True)
    plain = local.pack_linear_layers

    def one_layer_sums_few_rows_otherwise(model, *options):
        plain(model, *options)
        layer = model.model.layers[1].mlp.down_proj
        forward = layer.forward
        layer.__dict__["forward"] = lambda x: forward(x) * (1 + 1e-6 * (len(x) < 24))

    monkeypatch.setattr(local, "pack_linear_layers", one_layer_sums_few_rows_otherwise)
    engine = LocalEngine(settings)
    assert engine.shapes.constant
    engine.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width, num_pages", [(1, 24), (64, 6)])  # a decoding step, and a pack
def test_pages_that_share_a_product_keep_their_bits(monkeypatch, dtype, width, num_pages):
    skip_if_bits_depend_on_the_row_count(dtype)
    torch.manual_seed(0)
    query = torch.randn(4, 2, width, 3, 64).to(dtype)
    keys = torch.randn(num_pages, 6, 2, 64, 64).to(dtype)[:, :4]  # 4 of 6 slots are busy
    values = torch.randn(num_pages, 6, 2, 64, 64).to(dtype)[:, :4]
    hidden = torch.rand(4, width, num_pages * 64) < 0.3
    results = []
    for pages_per_product in (1, 2, num_pages):
        numbers = pages_per_product * max(keys[0].numel(), query.numel())
        monkeypatch.setattr(pages_module, "NUMBERS_PER_PRODUCT", numbers)
        results.append(attend_pages(query, keys, values, hidden, 0.125))
        for one_page, several in zip(results[0], results[-1], strict=True):
            assert torch.equal(one_page, several)


def test_gradients_and_entropies_are_those_of_plain_attention(models):
    skip_if_bits_depend_on_the_row_count(torch.float32)
    name = models("qwen2")
    engine, _ = make_pair(name, "float32")
    batch = roll_out(engine)
    engine.close()
    results = []
    for exact in (False, True):
        _, worker = make_pair(name, "float32", exact)
        with worker.weights.computing():
            scores = worker._score_rows(batch, temperature=1.0, with_entropy=True)
            loss, _ = policy_loss(batch, scores)
            loss.backward()
        gradients = {key: p.grad.full_tensor() for key, p in worker.trained_parameters.items()}
        results.append((scores.entropy.detach(), gradients))
    (plain_entropy, plain), (entropy, exact) = results
    torch.testing.assert_close(entropy, plain_entropy, rtol=1e-5, atol=1e-5)
    assert plain.keys() == exact.keys() and len(plain) > 10
    for key, gradient in plain.items():
        error = (exact[key] - gradient).norm() / gradient.norm()
        assert error < 1e-5, (key, error)


def test_a_wrong_token_stops_the_run_and_is_named_or_is_warned_of_once(models, capsys):
    skip_if_bits_depend_on_the_row_count(torch.bfloat16)
    engine, worker = make_pair(models("llama"), "bfloat16")
    batch = roll_out(engine)
    engine.close()
    row, column = 6, int(batch.mask[6].nonzero()[2])
    value = batch.engine_logps[row, column]
    batch.engine_logps[row, column] = torch.nextafter(value, torch.tensor(0.0))  # the next float
    where = rf"1 of .* In trajectory 6, token {batch.targets[row, column]} at position {column + 1}"
    scored = replace(batch, old_logps=torch.zeros_like(batch.engine_logps))
    worker.update(scored, policy_loss, with_entropy=True)  # newer weights may score it now
    _, worker = make_pair(models("llama"), "bfloat16")
    with pytest.raises(RuntimeError, match=where):
        worker.score(batch)
    with pytest.raises(RuntimeError, match=where):
        worker.update(batch, policy_loss, with_entropy=True)
    capsys.readouterr()
    worker = Worker(worker.config, CPU, num_updates=4, exactness=Exactness.TRIED)
    frozen = worker.reference()
    frozen_logps = frozen.score(batch).logps  # compares nothing
    assert torch.equal(frozen_logps, worker.score(batch).logps)
    worker.update(batch, policy_loss, with_entropy=True)
    warnings = re.findall("warning: .*", capsys.readouterr().err)
    assert len(warnings) == 1 and re.match(f"warning: {where}.*rollout.exact=false", warnings[0])


def test_whole_runs_are_exact(tmp_path, monkeypatch):
    """Two processes with FSDP, several turns and updates."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # without AMX
    skip_if_bits_depend_on_the_row_count(torch.bfloat16)
    name = make_model(tmp_path / "tiny", **{**SHAPE, "vocab_size": 98, "initializer_range": 0.1})
    common = [
        "ppo",
        *letter_run(tmp_path, name),
        "data.responses_per_prompt=4",
        "actor.lr=1e-3",
        "actor.dtype=bfloat16",
        "actor.gradient_checkpointing=true",
        "actor.max_length_per_device=400",
        "rollout.max_running=16",
        "rollout.max_turns=2",
        "rollout.train_sampling_params.max_new_tokens=12",
        "rollout.train_sampling_params.stop=[a,e,s]",
        "rollout.train_sampling_params.temperature=0.9",
        "trainer.max_steps=2",
    ]
    (tmp_path / "env.py").write_text(
        "def reward_fn(messages):\n    return sum(map(ord, messages[-1]['content'])) % 7\n"
        "def interact(messages):\n    return [{'role': 'user', 'content': 'and now?'}]\n"
    )
    adapters = ["actor.lora_rank=8", "actor.lr=1e-2", "kl.coef=0.01", "kl.type=loss"]
    variants = {
        "by_default": ["actor.update_per_rollout=2", "kl.coef=0.01", "kl.type=reward"],
        "adapters": [*adapters, "rollout.exact=true", "rollout.check_weights=true"],
    }
    runs = [[*common, f"trainer.save_dir={tmp_path / key}", *v] for key, v in variants.items()]
    launch_runs(2, runs)
    for key in variants:
        lines = read_metrics(tmp_path / key)
        assert len(lines) == 2
        for line in lines:
            for metric in ("logp_difference", "kl_k1", "kl_k3", "outside"):
                assert line[f"actor/mismatch_{metric}"] == 0, (key, metric)


def compose_config(*arguments):
    given = [*BASE["ppo"], "actor.dtype=float32", *arguments]
    return compose(PPOConfig, read_arguments(PPOConfig, given))[0]


SERVER = ["rollout.engine=server", "rollout.server_urls=[http://a]", "rollout.shared_dir=weights"]


def test_it_is_demanded_left_out_or_tried():
    """Of a server it is not known before it is asked."""
    for given, expected in (
        (["rollout.exact=true"], Exactness.DEMANDED),
        (["rollout.exact=false"], Exactness.OFF),
        ([], Exactness.TRIED),
        (["trainer.rollouts_from=."], Exactness.ASSUMED),
        (SERVER, Exactness.OFF),
        ([*SERVER, "rollout.exact=true"], Exactness.DEMANDED),
    ):
        assert choose_exactness(compose_config(*given)) is expected


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["actor.tp_size=2"], "actor.tp_size=2: set 1"),
        (["actor.sp_size=2"], "actor.sp_size=2: set 1"),
        (["rollout.partial=true"], "rollout.partial=true"),
        (["trainer.deterministic=false"], "trainer.deterministic=false"),
        (["rollout.max_running=8"], "rollout.max_running=8: set at least 16"),
        (["actor.lora_rank=1"], "actor.lora_rank=1 and actor.dtype="),
        (["actor.lora_rank=4", "actor.quantize_base=nf4"], "actor.quantize_base=nf4: the engine"),
        ([*SERVER, "actor.lora_rank=4"], "actor.lora_rank=4 and rollout.engine=server"),
        (["actor.compile=true"], "actor.compile=true"),
        (["rollout.engine=sglang"], "rollout.engine=sglang: set rollout.engine=local"),
    ],
)
def test_where_it_cannot_hold_it_is_not_tried(arguments, reason):
    """messages.txt has the refusal where it is demanded."""
    config = compose_config(*arguments)
    [obstacle] = exact_obstacles(config)
    assert obstacle.startswith(reason)
    assert choose_exactness(config) is Exactness.OFF


@pytest.mark.parametrize(
    ("limit", "dtype", "expected"),
    [
        ("", "bfloat16", Exactness.OFF),
        ("", "auto", Exactness.OFF),
        ("AVX512_CORE_AMX", "bfloat16", Exactness.OFF),
        ("", "float32", Exactness.TRIED),
        ("avx512_core_bf16", "bfloat16", Exactness.TRIED),
    ],
)
def test_it_is_not_tried_with_amx(monkeypatch, limit, dtype, expected):
    """On such a CPU all log-probabilities of SmolLM2-135M differed by rounding in bf16."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    config = compose_config(f"actor.dtype={dtype}")
    assert choose_exactness(config) is expected
    assert any("AMX" in text for text in exact_obstacles(config)) == (expected is Exactness.OFF)
