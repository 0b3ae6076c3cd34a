"""Weights that are not those of config.json are refused; what is left out on purpose is allowed."""

import json
import runpy

import pytest
import torch
import torch.distributed as dist
from common import ROOT, make_gpt2, make_model, write_letter_task
from parity import worker_config
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rl2.config.parse import parse
from rl2.config.schema import PPOConfig
from rl2.engine.base import EngineSettings
from rl2.engine.local import LocalEngine
from rl2.model.folder import check_model
from rl2.model.weight_files import check_weight_files
from rl2.ppo_setup import set_up
from rl2.worker import Worker


@pytest.fixture(autouse=True)
def without_group():
    """A refused start leaves its process group, which ends with its process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def read_files(name):
    return load_file(f"{name}/model.safetensors")


def write_files(name, weights):
    save_file(weights, f"{name}/model.safetensors", metadata={"format": "pt"})


def change_config(name, **changes):
    with open(f"{name}/config.json") as file:
        config = json.load(file)
    with open(f"{name}/config.json", "w") as file:
        json.dump(config | changes, file)


HEAD = "lm_head.weight"
NORM = "model.norm.weight"
ADAPTERS = {
    f"model.layers.{layer}.mlp.up_proj.lora_{part}.weight": torch.ones(2, 2)
    for layer in range(2)
    for part in "AB"
}
TRL_HEAD = "v_head.summary.weight"
CHANGES = [  # (tensors that the files get, None where they lose one; the problem)
    ({TRL_HEAD: torch.ones(1, 8)}, f"config.json lacks {TRL_HEAD}, .*save the model below it"),
    (ADAPTERS, "lacks 4 of them, such as model.layers.0.mlp.up_proj.lora_A.weight, "),
    ({NORM: None}, f"the files lack {NORM}"),
    ({HEAD: None}, f"the files lack {HEAD}"),
    ({NORM: torch.ones(31)}, rf"shapes of {NORM} \(\[31\] in the files, \[32\] in the model"),
    ({HEAD: torch.ones(98, 32)}, f"ties {HEAD} to the embeddings, .* set tie_word_embeddings to"),
]


def make_changed(folder, tensors) -> str:
    """A model whose files have other tensors than its config.json says."""
    name = make_model(folder, tied=tensors != {HEAD: None})
    changed = {**read_files(name), **tensors}
    write_files(name, {key: weight for key, weight in changed.items() if weight is not None})
    return name


@pytest.mark.parametrize(("tensors", "problem"), CHANGES)
def test_weights_of_another_model_are_refused(tmp_path, device, tensors, problem):
    """By the worker of an actor, of a teacher (frozen) and of a critic, and by the engine.

    Also for an engine that reads the files itself, but for an own head: only values would tell.
    """
    name = make_changed(tmp_path / "model", tensors)
    match = f"the weights of {name} cannot be used: .*{problem}"
    for num_updates in (4, 0):
        with pytest.raises(ValueError, match=match):
            Worker(worker_config(name), device, False, num_updates)
    with pytest.raises(ValueError, match=match):
        LocalEngine(EngineSettings(name, torch.float32, torch.device("cpu")))
    if HEAD not in tensors:  # a critic has none
        with pytest.raises(ValueError, match=match):
            Worker(worker_config(name), device, True, 4)
    if tensors.get(HEAD) is None:
        with pytest.raises(ValueError, match=match):
            check_weight_files(name)


def test_an_evaluation_by_an_engine_that_reads_the_files_itself_refuses_them(tmp_path, monkeypatch):
    monkeypatch.setattr("rl2.ppo_setup.choose_engine", lambda name: ("vllm", "for a test"))
    write_letter_task(tmp_path)
    keys = [
        "trainer.eval_only=true",
        f"actor.model_name={make_changed(tmp_path / 'model', {NORM: None})}",
        f"data.test_path={tmp_path / 'train.jsonl'}",
        f"rollout.env_path={tmp_path / 'env.py'}",
        f"trainer.save_dir={tmp_path / 'run'}",
    ]
    with pytest.raises(ValueError, match=f"cannot be used: the files lack {NORM}"):
        set_up(parse(PPOConfig, keys))


def test_experts_that_are_not_whole_are_refused(tmp_path, device):
    name = make_model(tmp_path / "model", "qwen3_moe", num_experts=4, moe_intermediate_size=16)
    weights = read_files(name)
    key = "model.layers.0.mlp.experts.0.gate_proj.weight"
    weights[key] = weights[key][:5].clone()
    write_files(name, weights)
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts.gate_up_proj are not whole"):
        Worker(worker_config(name), device, False, 4)


def test_a_reward_env_refuses_a_model_without_a_score_head(tmp_path, monkeypatch):
    monkeypatch.setenv("RL2_REWARD_MODEL", "model")
    env = runpy.run_path(str(ROOT / "envs/reward_model.py"))
    with pytest.raises(ValueError, match="RL2_REWARD_MODEL=.* lacks score.weight"):
        env["load_model"](make_model(tmp_path / "model"))


@pytest.mark.parametrize("family", ["qwen3_next", "glm4_moe"])
def test_layers_that_predict_several_tokens_are_named(tmp_path, device, capfd, family):
    """transformers ignores those of Qwen3-Next by their name; those of GLM are counted."""
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4}
    name = make_model(tmp_path / "model", family, num_nextn_predict_layers=1, **sizes)
    key = "mtp.fc.weight" if family == "qwen3_next" else "model.layers.2.eh_proj.weight"
    write_files(name, {**read_files(name), key: torch.ones(2)})
    Worker(worker_config(name), device, False, 4)
    assert f"{name}: transformers ignores {key}; an export lacks them" in capfd.readouterr().out


def test_constants_and_the_head_below_a_critic_are_allowed(tmp_path, device, capfd):
    """GPT-2's first files hold the body alone, with masks; others hold what rotary layers use."""
    name = make_gpt2(tmp_path / "gpt2")
    weights = {key.removeprefix("transformer."): w for key, w in read_files(name).items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.ones(1)}
    write_files(name, weights | masks)
    Worker(worker_config(name), device, False, 4)
    rotary = "model.layers.0.self_attn.rotary_emb"
    constants = {f"{rotary}.inv_freq": torch.ones(4), f"{rotary}.cos_cached": torch.ones(4)}
    name = make_model(tmp_path / "model", tied=False)
    write_files(name, read_files(name) | constants)
    for critic in (False, True):
        Worker(worker_config(name), device, critic, 4)
    assert "ignores" not in capfd.readouterr().out


def quantize_to_fp8(name):
    """Stores the linear layers as DeepSeek-V3 has them. Returns the weights that they stand for."""
    files, plain = {}, {}
    for key, weight in read_files(name).items():
        plain[key] = files[key] = weight
        if "_proj" in key:
            files[key] = (weight / 0.25).to(torch.float8_e4m3fn)
            files[f"{key}_scale_inv"] = torch.full((1, 1), 0.25)
            plain[key] = files[key].float() * 0.25
    write_files(name, files)
    change_config(
        name, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    return plain


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}])
def test_an_fp8_base_is_trained_and_exported_as_plain_weights(tmp_path, device, settings):
    name = make_model(tmp_path / "model", hidden_size=128, intermediate_size=128, head_dim=32)
    plain = quantize_to_fp8(name)
    check_model("key", name)
    worker = Worker(worker_config(name, dtype="bfloat16", **settings), device, False, 4)
    folder = str(tmp_path / "export")
    worker.export(folder, AutoTokenizer.from_pretrained(name))
    with open(f"{folder}/config.json") as file:
        config = json.load(file)
    assert "quantization_config" not in config
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    exported = read_files(folder)
    assert exported.keys() == plain.keys()
    for key, weight in plain.items():
        assert torch.equal(exported[key], weight.bfloat16()), key
    model = LocalEngine(EngineSettings(name, torch.float32, torch.device("cpu"))).model
    assert model.model.layers[0].self_attn.o_proj.weight.dtype == torch.float32


def test_lora_on_a_model_without_linear_layers_is_refused(tmp_path, device):
    settings = worker_config(make_gpt2(tmp_path / "model"), lora_rank=2, lora_targets=["c_attn"])
    with pytest.raises(ValueError, match="lora_rank=2: GPT2LMHeadModel has no linear layer"):
        Worker(settings, device, False, 4)


def test_a_quantized_model_is_refused_before_the_rows_are_read(tmp_path):
    name = make_model(tmp_path / "model")
    change_config(name, quantization_config={"quant_method": "awq", "bits": 4})
    words = [f"actor.model_name={name}", *write_letter_task(tmp_path)]
    (tmp_path / "train.jsonl").write_text("no rows")
    with pytest.raises(ValueError, match=r"actor.model_name=.* \(awq\).* unquantized model"):
        set_up(parse(PPOConfig, [*words, f"trainer.save_dir={tmp_path / 'run'}"]))
    with pytest.raises(ValueError, match=r"\(awq\)"):
        check_model("critic.model_name", name, critic=True)
