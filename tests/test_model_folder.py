"""What is wrong with a model folder or a name of the hub is one sentence with key and remedy."""

import json
import socket
import time

import pytest
import torch
from common import make_critic, make_model, make_tokenizer
from families import make_config
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import T5Config

from rl2.data.chat import ChatTemplate
from rl2.model.folder import (
    check_length,
    check_model,
    load_eos_token_ids,
    load_tokenizer,
    max_positions,
)

KEY = "actor.model_name"


@pytest.fixture
def name(tmp_path):
    """Yields the path of a complete model folder."""
    return make_model(tmp_path / "model")


def problem(name, critic=False) -> str:
    """The one sentence (or two) that refuses the model; it begins with the key and its value."""
    with pytest.raises(ValueError) as raised:
        load_tokenizer(KEY, str(name), critic)
    text = str(raised.value)
    assert text.startswith(f"{KEY}={name}: ") and "\n" not in text
    return text


def test_a_complete_folder_passes(name):
    tokenizer = load_tokenizer(KEY, name)
    assert ChatTemplate(tokenizer).stop_token_ids(load_eos_token_ids(name)) == [2]
    check_model("critic.model_name", name, critic=True)
    check_model("critic.model_name", make_critic(name), critic=True)


def test_without_generation_config_the_config_gives_the_stop_token(name, tmp_path):
    (tmp_path / "model/generation_config.json").unlink()
    assert load_eos_token_ids(name) == [2]
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["eos_token_id"] = [2, 5]
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    assert load_eos_token_ids(name) == [2, 5]


def test_files_that_are_missing_or_cut(name, tmp_path):
    folder = tmp_path / "model"
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for cut in (whole[: len(whole) // 2], whole[:5], b"version https://git-lfs.github.com/spec/v1"):
        weights.write_bytes(cut)
        assert f"model.safetensors is not whole ({len(cut):,} bytes); copy it" in problem(name)
    weights.unlink()
    assert "the folder has no weights" in problem(name)
    index = {
        "metadata": {},
        "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00001.safetensors is missing" in problem(name)
    (folder / "model-00001-of-00001.safetensors").write_bytes(whole)
    load_tokenizer(KEY, name)
    (folder / "tokenizer.json").write_text("{")
    assert "its tokenizer cannot be read" in problem(name)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "copy tokenizer.json and tokenizer_config.json from the model" in problem(name)
    (folder / "config.json").write_text('{"model_type": "frob"}')
    assert "its config cannot be read" in problem(name) and "frob" in problem(name)
    (folder / "config.json").unlink()
    assert "it has no config.json" in problem(name)


def test_models_of_another_kind(name, tmp_path):
    critic = make_critic(name)
    make_tokenizer().save_pretrained(critic)
    assert "reward model or a classifier (LlamaForSequenceClassification)" in problem(critic)
    config = json.loads((tmp_path / "model-critic/config.json").read_text())
    config["id2label"] = {"0": "a", "1": "b"}
    (tmp_path / "model-critic/config.json").write_text(json.dumps(config))
    assert "it scores 2 labels; a critic has one" in problem(critic, critic=True)
    T5Config().save_pretrained(tmp_path / "t5")
    save_file({"x": torch.zeros(1)}, tmp_path / "t5/model.safetensors")
    assert "t5 is not a causal" in problem(tmp_path / "t5")


def test_an_unknown_name_takes_one_request(monkeypatch):
    """Of a hub that does not answer; it took more than 24 seconds of retries."""
    from rl2.model import folder

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(folder, "HUB_TIMEOUT_SECONDS", 1.0)
        start = time.monotonic()
        assert f"the hub at {endpoint} does not give it" in problem("nobody/no-model")
        assert time.monotonic() - start < 12
    assert "there is no such folder" in problem("runs/no/model")


def test_sequences_are_no_longer_than_what_positions_allow(name, tmp_path):
    assert max_positions(name) == 512
    check_length(KEY, name, 512, "a row is too long")
    with pytest.raises(ValueError, match="at most 512 tokens .*, but a row is too long"):
        check_length(KEY, name, 513, "a row is too long")
    make_config("phi3 (longrope)").save_pretrained(tmp_path / "phi")
    check_length(KEY, str(tmp_path / "phi"), 4096, "a row is too long")
    with pytest.raises(ValueError, match="at most 4096 tokens .* longrope"):
        check_length(KEY, str(tmp_path / "phi"), 4097, "a row is too long")
