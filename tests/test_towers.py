"""Models with a frozen vision tower: trained on text, against plain Hugging Face models.

test_special_models.py tests their layouts.
"""

import pytest
import torch
from common import check_adapter, make_tokenizer
from engine_contract import check_logps, play
from parity import make_batch, policy_loss, worker_config
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3Config, Qwen2_5_VLConfig

from rl2.engine.base import EngineSettings
from rl2.engine.local import LocalEngine
from rl2.model.classes import idle_parts
from rl2.model.folder import check_model
from rl2.worker import Worker

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


FAMILIES = {"gemma3": gemma3, "qwen2_5_vl": qwen2_5_vl}


def save_family(family, folder, **sizes) -> str:
    """Saves a small random model, with a file of its processor, and returns its path.

    `sizes` are those of the text model.
    """
    torch.manual_seed(0)
    config = FAMILIES[family](**sizes)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"do_resize": true}')
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model of each family."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_family(family, folder / family)
    return folder


@pytest.fixture(params=FAMILIES)
def name(request, folder):
    return str(folder / request.param)


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


def test_the_engine_and_the_export_have_the_towers(tmp_path, name, device):
    check_model("actor.model_name", name)
    worker = Worker(worker_config(name, lr=1e-2), device, False, 4)
    assert not any("vision" in key or "visual" in key for key in worker.trained_parameters)
    engine = LocalEngine(EngineSettings(name, torch.float32, torch.device("cpu")))
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
