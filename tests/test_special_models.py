"""Models with sinks, caps, a biased head, recurrent layers or a frozen vision tower.

Layouts, exports, refusals, adapters, the engine and whole runs. test_windows.py compares their
answers with transformers, the admission their log-probabilities and gradients.
"""

import sys
from unittest import mock

import pytest
import torch
from common import (
    RECURRENT,
    SPECIAL,
    check_adapter,
    launch,
    launch_runs,
    letter_run,
    make_model,
    make_routed,
    make_samples,
    make_tokenizer,
    read_metrics,
    read_untimed_metrics,
    same_weights,
)
from engine_contract import check_logps, make_prompts, play
from parity import (
    SMALL_BUDGET,
    assert_equal_steps,
    make_batch,
    plain_scores,
    policy_loss,
    save_layouts,
    two_steps,
    worker_config,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Qwen2_5_VLConfig,
)

from rl2.attention.pages import PAGE_SIZE_TOKENS
from rl2.attention.ring import Ring
from rl2.batch import collate
from rl2.config.conditions import Exactness
from rl2.engine.base import EngineSettings
from rl2.engine.cache import DenseKVCache
from rl2.engine.local import LocalEngine
from rl2.model.admission import gradients_of, packed_columns, plain_columns, relative_distances
from rl2.model.attachment import ModelSettings
from rl2.model.classes import idle_parts
from rl2.model.folder import check_model
from rl2.model.recurrent import RecurrentLayers
from rl2.model.token_model import TokenModel
from rl2.worker import Worker

CPU = torch.device("cpu")
TEXT = {
    "vocab_size": 98,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
TOP = {"tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}


def gemma3(**sizes):
    text = {**TEXT, "head_dim": 8, "sliding_window": 6, **sizes}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    vision = {**VISION, "num_hidden_layers": 2, "image_size": 8, "patch_size": 2}
    return Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=97, **TOP
    )


def qwen2_5_vl(**sizes):
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "patch_size": 2, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope, **sizes},
        vision_config=vision,
        image_token_id=97,
        video_token_id=96,
        vision_start_token_id=95,
        vision_end_token_id=94,
        **{**TOP, "tie_word_embeddings": False},
    )


TOWERS = {"gemma3": gemma3, "qwen2_5_vl": qwen2_5_vl}


def save_family(family, folder, **sizes) -> str:
    """Saves a small random model, with a file of its processor, and returns its path.

    `sizes` are those of the text model.
    """
    torch.manual_seed(0)
    config = TOWERS[family](**sizes)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"do_resize": true}')
    return str(folder)


FAMILIES = [*SPECIAL, *RECURRENT, *TOWERS, "glm4_moe"]
# Of two processes. Models with sinks have no plan of tensor parallelism that rl2 knows, and
# recurrent ones no ring.
LAYOUTS = {"fsdp": {}, "sp": {"sp_size": 2}, "tp": {"tp_size": 2}}


def families_of(layout):
    """Families whose layers differ in this layout."""
    if layout == "fsdp":
        return [*RECURRENT, *TOWERS, "glm4_moe"]
    return [*SPECIAL, *TOWERS] if layout == "sp" else ["gemma2", "phi"]


def two_updates(folder, families, **changes):
    """The results of two updates by the name of the family."""
    settings = {"max_length_per_device": SMALL_BUDGET, "gradient_checkpointing": 1, **changes}
    results = {}
    for family in families:
        name = f"{folder}/{family}"
        results[family] = two_steps(name, False, CPU, make_batch(), **settings)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model of each family."""
    folder = tmp_path_factory.mktemp("models")
    for family, overrides in (SPECIAL | RECURRENT).items():
        make_model(folder / family, family, **overrides)
    for family in TOWERS:
        save_family(family, folder / family)
    make_routed(folder / "glm4_moe")
    return folder


@pytest.fixture
def name(request, folder):
    if not RECURRENT and request.param not in FAMILIES:
        pytest.skip("the engine needs a newer transformers")
    return str(folder / request.param)


def each(*families):
    return pytest.mark.parametrize("name", families, indirect=True)


def test_layouts_give_the_updates_of_one_process(folder, device):
    """Their gradients are clipped, so that a wrong sum shows in the norm. Every process has the
    buffers.
    """
    launch(2, __file__, folder, folder / "out")
    expected = two_updates(folder, FAMILIES, share_prompts=False)
    starts = {}
    for family in FAMILIES:
        load = load_plain if family in TOWERS else AutoModelForCausalLM.from_pretrained
        starts[family] = load(folder / family).state_dict()
    for layout, results in torch.load(folder / "out").items():
        assert list(results) == families_of(layout)
        for family, result in results.items():
            assert_equal_steps(result, expected[family], (layout, family), 1e-4, 1e-3)
            for key, weight in expected[family]["weights"].items():
                error = (result["weights"][key] - weight).norm()
                moved = (weight - starts[family][key]).norm()  # small tensors move by little
                assert error <= 2e-3 * moved + 1e-7, (layout, family, key)


@each(*SPECIAL)
def test_an_export_is_the_trained_model(name, tmp_path, device):
    batch = make_batch()
    worker = Worker(worker_config(name, lr=1e-2), device, False, 4)
    before = worker.score(batch).logps
    worker.update(batch, policy_loss, with_entropy=True)
    logps = worker.score(batch).logps
    assert (logps - before).abs().max() > 1e-3
    worker.export(str(tmp_path / "export"), make_tokenizer())
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", dtype=torch.float32, attn_implementation="eager"
    )
    expected = plain_scores(plain, batch).logps
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-4)
    stored = dict(AutoModelForCausalLM.from_pretrained(name).named_parameters())
    for key, weight in plain.named_parameters():  # sinks and biases are trained too
        if key.endswith(("sinks", "lm_head.bias")):
            assert not torch.equal(weight, stored[key])


RUNS = [(family, []) for family in RECURRENT if family in ("lfm2", "qwen3_next")]
QLORA = ["actor.lora_rank=4", "actor.quantize_base=nf4", "kl.coef=0.001", "kl.type=loss"]
RUNS.append(("llama", QLORA))


@pytest.mark.nightly
@pytest.mark.parametrize("family, keys", RUNS)
def test_grpo_runs_and_resumes_to_equal_bits(tmp_path, family, keys):
    """Three steps of two processes; the engine's log-probabilities are those of the trainer.

    The reference of a base in 4 bits is that base.
    """
    sizes = RECURRENT.get(family, {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16})
    name = make_model(tmp_path / "tiny", family, **sizes)
    arguments = ["ppo", *letter_run(tmp_path, name), *keys]
    arguments += ["trainer.max_steps=3", "trainer.save_freq=2"]
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    resume = [f"trainer.resume={run / 'checkpoints/step_2'}", f"trainer.save_dir={resumed}"]
    launch_runs(2, [[*arguments, f"trainer.save_dir={run}"], [*arguments, *resume]])
    lines = read_metrics(run)
    assert len(lines) == 3
    for line in lines:
        assert line["actor/grad_norm"] > 0
        assert abs(line["actor/mismatch_logp_difference"]) < 1e-4
    if keys:
        assert lines[0]["actor/kl"] == 0 and lines[-1]["actor/kl"] > 0
    last_lines = [line for line in read_untimed_metrics(run) if line["step"] > 2]
    assert read_untimed_metrics(resumed) == last_lines
    assert same_weights(run / "model", resumed / "model")
    assert not same_weights(run / "model", name)


def load_plain(name):
    return AutoModelForImageTextToText.from_pretrained(
        name, dtype=torch.float32, attn_implementation="eager"
    )


def tower_weights(hf):
    """The names of the weights of the towers."""
    ids = {id(weight) for tower in idle_parts(hf) for weight in tower.parameters()}
    names = {name for name, weight in hf.named_parameters() if id(weight) in ids}
    assert len(names) > 10
    return names


@each(*TOWERS)
def test_the_engine_and_the_export_have_the_towers(tmp_path, name, device):
    check_model("actor.model_name", name)
    worker = Worker(worker_config(name, lr=1e-2), device, False, 4)
    assert not any("vision" in key or "visual" in key for key in worker.trained_parameters)
    engine = LocalEngine(EngineSettings(name, torch.float32, CPU))
    engine.verify_weights(worker.iter_full_weights(torch.float32), 0)
    batch = make_batch()
    worker.update(batch, policy_loss, with_entropy=True)
    engine.load_weights(worker.iter_full_weights(torch.float32), 1)
    worker.export(str(tmp_path / "export"), make_tokenizer())
    exported, start = load_plain(tmp_path / "export"), load_plain(name)
    assert type(exported) is type(start)
    assert type(AutoConfig.from_pretrained(tmp_path / "export")) is type(start.config)
    assert (tmp_path / "export/preprocessor_config.json").read_text() == '{"do_resize": true}'
    before = start.state_dict()
    towers = tower_weights(start)
    after = exported.state_dict()
    changed = {key for key, weight in after.items() if not weight.equal(before[key])}
    assert changed and not changed & towers
    prompts = [[3, 40, 5], list(range(10, 80))]
    check_logps(play(engine, prompts, max_new_tokens=20), prompts, exported, 1.0)
    engine.close()


@each(*TOWERS)
@pytest.mark.parametrize(
    "changes",
    [{"dtype": "bfloat16"}, {"lora_rank": 3}, {"lora_rank": 3, "quantize_base": "nf4"}],
)
def test_the_text_model_alone_is_trained_and_stored_in_few_bits(tmp_path, name, device, changes):
    worker = Worker(worker_config(name, lr=1e-2, **changes), device, False, 4)
    assert worker.trained_parameters
    for key in worker.trained_parameters:
        assert ".language_model." in key or "lm_head" in key
        assert (".lora_" in key) == ("lora_rank" in changes)
    parameters = worker.model.hf.named_parameters()
    in_4_bits = [key for key, weight in parameters if weight.dtype == torch.uint8]
    assert len(in_4_bits) == (2 * 7 if "quantize_base" in changes else 0)
    assert all(".language_model." in key for key in in_4_bits)
    worker.update(make_batch(), policy_loss, with_entropy=True)
    weights = dict(worker.iter_full_weights(worker.dtype))
    plain = load_plain(name).to(worker.dtype)
    before = plain.state_dict()
    changed = {key for key, weight in weights.items() if not weight.equal(before[key])}
    assert changed and not changed & tower_weights(plain)
    if changes == {"lora_rank": 3}:
        worker.export(str(tmp_path / "export"), make_tokenizer())
        check_adapter(AutoModelForImageTextToText, name, tmp_path / "export")


def test_dropout_of_the_text_model_is_named(tmp_path, device, capsys):
    name = save_family("gemma3", tmp_path / "model", attention_dropout=0.1)
    Worker(worker_config(name), device, False, 4)
    assert "dropout is off in training (attention_dropout=0.1)" in capsys.readouterr().out


@each(*RECURRENT)
def test_documents_of_several_chunks(name):
    """transformers computes gated delta rules in chunks of 64 tokens, and pads the last one."""
    samples = make_samples(seed=5, num_groups=2, group_size=3, longest=180)
    plain = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    hf = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="rl2")
    columns = plain_columns(plain, samples)
    model = TokenModel(hf, Ring(), attachments=[RecurrentLayers(hf)])
    assert model.repeats_prompts  # so plans of packs count a prompt once for each of its answers
    packed = packed_columns(model, collate(samples))
    torch.testing.assert_close(packed, columns, rtol=0, atol=1e-4)
    for scores in (columns, packed):
        (scores * torch.linspace(-1, 2, scores.numel()).view_as(scores)).sum().backward()
    for distance in relative_distances(gradients_of(hf), gradients_of(plain)).values():
        assert distance < 1e-4


@each("lfm2")
def test_layers_that_would_be_cut_or_compiled_are_refused(name):
    hf = AutoModelForCausalLM.from_pretrained(name)
    for key, value, right in (("sp_size", 2, 1), ("tp_size", 2, 1), ("compile", True, "false")):
        settings = ModelSettings(worker_config(name, **{key: value}), torch.float32)
        message = rf"(?i){key}={value}: .* \(Lfm2ShortConv\).* set {key}={right}"
        with pytest.raises(ValueError, match=message):
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


if __name__ == "__main__":  # a process of the test of layouts
    settings = {key: {"families": families_of(key), **keys} for key, keys in LAYOUTS.items()}
    save_layouts(two_updates, settings, *sys.argv[1:])
