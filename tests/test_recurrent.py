"""Models with recurrent layers: refusals, adapters, micro-batches, slots of the engine.

test_windows.py compares their answers with transformers, the admission their log-probabilities and
gradients; test_special_models.py their layouts and whole runs.
"""

from unittest import mock

import pytest
import torch
from common import RECURRENT, check_adapter, make_model, make_samples, make_tokenizer
from engine_contract import check_logps, make_prompts, play
from parity import make_batch, policy_loss, worker_config
from transformers import AutoModelForCausalLM

from rl2.attention.pages import PAGE_SIZE_TOKENS
from rl2.attention.ring import Ring
from rl2.batch import collate
from rl2.config.conditions import Exactness
from rl2.engine.base import EngineSettings
from rl2.engine.cache import DenseKVCache
from rl2.engine.local import LocalEngine
from rl2.model.admission import gradients_of, packed_columns, plain_columns, relative_distances
from rl2.model.attachment import ModelSettings
from rl2.model.recurrent import RecurrentLayers
from rl2.model.token_model import TokenModel
from rl2.packing import plan_micro_batches
from rl2.worker import Worker

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not RECURRENT, reason="the engine needs a newer transformers")


@pytest.fixture
def name(request, tmp_path):
    return make_model(tmp_path / "tiny", request.param, **RECURRENT[request.param])


def each(*families):
    return pytest.mark.parametrize("name", families or RECURRENT, indirect=True)


def test_a_prompt_counts_once_for_each_answer():
    """So the rows that recurrent layers see stay within the budget."""
    samples = make_samples(seed=1, num_groups=2, group_size=8)
    batch = collate(samples)
    lengths = [len(sample.tokens) - 1 for sample in samples]
    shared = plan_micro_batches(batch, 100, 1)
    repeated = plan_micro_batches(batch, 100, 1, repeats_prompts=True)
    assert len(repeated) > len(shared)
    for [rows] in repeated:
        assert sum(lengths[row] for row in rows) <= 100
    assert sorted(row for [rows] in repeated for row in rows) == list(range(16))


@each()
def test_documents_of_several_chunks(name):
    """transformers computes gated delta rules in chunks of 64 tokens, and pads the last one."""
    samples = make_samples(seed=5, num_groups=2, group_size=3, longest=180)
    plain = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    hf = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="rl2")
    columns = plain_columns(plain, samples)
    model = TokenModel(hf, Ring(), attachments=[RecurrentLayers(hf)])
    packed = packed_columns(model, collate(samples))
    torch.testing.assert_close(packed, columns, rtol=0, atol=1e-4)
    for scores in (columns, packed):
        (scores * torch.linspace(-1, 2, scores.numel()).view_as(scores)).sum().backward()
    for distance in relative_distances(gradients_of(hf), gradients_of(plain)).values():
        assert distance < 1e-4


@each("lfm2")
def test_layers_that_would_be_cut_are_refused(name):
    hf = AutoModelForCausalLM.from_pretrained(name)
    for key in ("sp_size", "tp_size"):
        settings = ModelSettings(worker_config(name, **{key: 2}), torch.float32)
        with pytest.raises(ValueError, match=rf"{key}=2: .* \(Lfm2ShortConv\).* set {key}=1"):
            RecurrentLayers.attach(settings, hf)


@each("lfm2")
def test_equal_bits_are_refused_if_they_are_demanded(name, device):
    """Otherwise nothing is compared."""
    worker = Worker(worker_config(name), device, num_updates=4, exactness=Exactness.TRIED)
    assert worker.model.exactness is Exactness.OFF
    with pytest.raises(ValueError, match="rollout.exact=true: Lfm2.* has recurrent layers"):
        Worker(worker_config(name), device, num_updates=4, exactness=Exactness.DEMANDED)


@each("jamba", "nemotron_h", "qwen3_next")
def test_adapters(name, device, tmp_path):
    """The engine applies them too."""
    worker = Worker(worker_config(name, lr=1e-2, lora_rank=3), device, False, 4)
    engine = LocalEngine(EngineSettings(name, worker.dtype, CPU, adapters=worker.config))
    for _ in range(2):
        worker.update(make_batch(), policy_loss, with_entropy=True)
    worker.export(str(tmp_path / "export"), make_tokenizer())
    check_adapter(AutoModelForCausalLM, name, tmp_path / "export")
    engine.load_weights(worker.iter_trained_weights(worker.dtype), 2)
    engine.verify_weights(worker.iter_unmerged_weights(worker.dtype), 2)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    prompts = [[5, 6, 7], [9] * 20]
    check_logps(play(engine, prompts, max_new_tokens=8), prompts, merged, 1.0)
    engine.close()


@each("lfm2", "qwen3_5_text", "jamba")
def test_slots_begin_with_the_state_of_their_prompt(name):
    """More answers than slots, some to the same prompt, some to one of a single token.

    Weights that change between two rounds leave no state behind, nor does sleep.
    """
    engine = LocalEngine(EngineSettings(name, torch.float32, CPU, max_running_requests=4))
    plain = AutoModelForCausalLM.from_pretrained(name)
    prompts = [[5], *[[7, 8, 9, 30]] * 5, [5], *[list(range(3, 90))] * 3]
    for round_ in range(2):
        check_logps(play(engine, prompts, max_new_tokens=12 + round_), prompts, plain, 1.0)
        with torch.no_grad():
            for weight in plain.parameters():
                weight.mul_(1.1)
        engine.sleep()
        engine.wake()
        engine.load_weights(plain.state_dict().items(), round_ + 1)
    engine.close()


@each("jamba", "lfm2")
def test_slots_move_with_their_keys_and_states(name, monkeypatch):
    """Without equal bits, busy slots move to the front when others end. The cache is that of GPUs,
    which grows meanwhile.
    """
    monkeypatch.setattr(DenseKVCache, "growth", PAGE_SIZE_TOKENS)
    monkeypatch.setattr(LocalEngine, "_new_cache", lambda e: DenseKVCache(e.max_running_requests))
    settings = EngineSettings(
        name, torch.float32, CPU, max_running_requests=20, deterministic=False
    )
    engine = LocalEngine(settings)
    plain = AutoModelForCausalLM.from_pretrained(name)
    move_slot = mock.Mock(wraps=engine.states.move_slot)
    monkeypatch.setattr(engine.states, "move_slot", move_slot)
    prompts = make_prompts(24) + [[5] * 70]
    answers = play(engine, prompts, max_new_tokens=75, stop_token_ids=tuple(range(3, 10)))
    assert move_slot.called
    check_logps(answers, prompts, plain, 1.0)
    engine.close()
