"""The memory plan: predicted bytes against those of real tensors."""

import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import memory_fits
import pytest
import shapes
import torch
from common import launch, make_model, run, run_main
from configs import resolved
from transformers import AutoConfig

from rl2 import gpu_memory
from rl2.config.schema import PPOConfig, SFTConfig
from rl2.parallel.device import GIB
from rl2.tools.memory import predict
from rl2.tools.plan import main

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "vocab_size": 1024,
}


@pytest.mark.parametrize("world", [1, 2])
def test_predicted_bytes_are_those_of_a_real_run(tmp_path, world):
    model = make_model(tmp_path / "model", "qwen3", **SIZES)
    # Of more layers and fewer tokens: what is gathered of an embedding takes more than is
    # predicted, which would be a large part of a model whose layers take 4 bits.
    sizes = {**SIZES, "hidden_size": 256, "num_hidden_layers": 6, "vocab_size": 128}
    sizes["initializer_range"] = 0.02  # or the tokens of a row are certain, and have no gradient
    quantised = make_model(tmp_path / "quantised", "qwen3", **sizes)
    launch(world, "tests/measured_memory.py", model, quantised, tmp_path / "bytes.json")
    jobs = json.loads((tmp_path / "bytes.json").read_text())
    assert len(jobs) >= 5
    for job, bytes_of in jobs.items():
        assert bytes_of["predicted"].keys() == bytes_of["measured"].keys()
        for phase, measured in bytes_of["measured"].items():
            assert bytes_of["predicted"][phase] == pytest.approx(measured, rel=0.12), (job, phase)


def test_the_table_of_the_docs_has_the_plan_of_today():
    plans = json.loads(memory_fits.FILE.read_text())
    assert len(plans) == len(memory_fits.MODELS) * len(memory_fits.METHODS)
    assert plans["qwen3-0.6b qlora"] == asdict(memory_fits.make_plan("qwen3-0.6b", "qlora")), (
        "run python tests/memory_fits.py and python docs/generate.py"
    )


EXPERTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 3,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
ESTIMATED = [  # (shape or family, changes of its config, processes, keys)
    ("qwen3-1.7b", {"num_hidden_layers": 6}, 1, {}),  # embedding and head are tied
    ("qwen2.5-7b", {"num_hidden_layers": 4}, 8, {}),  # 7 queries share a key
    ("qwen2.5-7b", {"num_hidden_layers": 4}, 8, {"fsdp_size": 4, "optimizer": "muon"}),
    ("qwen3-8b", {"num_hidden_layers": 4}, 1, {"lora_rank": 16}),
    ("qwen3-8b", {"num_hidden_layers": 4}, 4, {"lora_rank": 16, "quantize_base": "nf4"}),
    ("qwen3_moe", EXPERTS, 2, {"offload_optimizer": True}),
    ("gemma3_text", {"num_hidden_layers": 6, "vocab_size": 65536}, 2, {"offload_model": True}),
]


@pytest.mark.parametrize(("shape", "changes", "world", "keys"), ESTIMATED)
def test_the_estimate_of_auto_is_on_the_safe_side(tmp_path, shape, changes, world, keys):
    """Of the plan, which counts what the code allocates: it is above it, and not by much."""
    if shape in shapes.SHAPES:
        model_config = shapes.make_config(shape, **changes)
    else:
        model_config = AutoConfig.for_model(shape, **changes)
    model_config.save_pretrained(tmp_path)
    config = SFTConfig()
    config.data.batch_size = 1000
    config.actor = replace(
        config.actor, model_name=str(tmp_path), max_length_per_device=8192, **keys
    )
    [model] = gpu_memory.measure(config, world)[0].values()
    for num_again, is_kept in ((0, False), (1, True), (len(model.layers), False)):
        config.actor.gradient_checkpointing, config.actor.keep_gathered = num_again, is_kept
        plan = predict(config, world)
        assert model.resting == pytest.approx(plan.steady, rel=0.01, abs=2**16)
        share = model.updating(8192, num_again, is_kept) / plan.peaks["update"]
        assert 1 <= share < 1.3, (num_again, share)


MODEL = ("qwen3-1.7b", {"num_hidden_layers": 6})
CHOICES = [  # (GiB of the GPU, keys, the length and the layers that run again)
    (79.2, {}, 32768, False),
    (32, {}, 16384, False),
    (24, {}, 8192, False),
    (20, {}, 8192, 3),
    (10, {}, 8192, True),  # it does not fit
    (20, {"max_length_per_device": 4096}, 4096, False),
    (20, {"gradient_checkpointing": False}, 8192, False),
    (32, {"gradient_checkpointing": True}, 32768, True),
    (79.2, {"gradient_checkpointing": 2, "max_length_per_device": 512}, 512, 2),
    (79.2, {"offload_optimizer": True, "max_length_per_device": 60000}, 60000, False),
]


def make_config(folder, kind=SFTConfig, **keys):
    """A config with the model MODEL in `folder`."""
    shapes.make_config(MODEL[0], **MODEL[1]).save_pretrained(folder)
    config = kind()
    config.actor = replace(config.actor, model_name=str(folder), **keys)
    return resolved(config)


@pytest.mark.parametrize(("gib", "keys", "length", "again"), CHOICES)
def test_auto_takes_long_packs_and_runs_few_layers_again(tmp_path, gib, keys, length, again):
    config = make_config(tmp_path, **keys)
    lines = gpu_memory.choose(config, 1, int(gib * GIB))
    actor = config.actor
    assert (actor.max_length_per_device, actor.gradient_checkpointing) == (length, again)
    for key in ("max_length_per_device", "gradient_checkpointing"):
        assert any(f"actor.{key}=auto" in line for line in lines) == (key not in keys)
    before = asdict(config)
    assert gpu_memory.choose(config, 1, int(gib * GIB)) == [] and asdict(config) == before


def test_auto_has_room_for_the_longest_row_and_for_the_other_models(tmp_path):
    config = make_config(tmp_path / "long")
    config.data.max_length = 50000
    gpu_memory.choose(config, 1, int(30 * GIB))
    assert config.actor.max_length_per_device == 50000
    numbers = []
    for estimator, coef in (("reinforce", 0.0), ("reinforce", 0.1), ("gae", 0.1)):
        ppo = make_config(tmp_path / "model", PPOConfig)
        ppo.adv.estimator, ppo.kl.coef, ppo.kl.type = estimator, coef, "loss"
        gpu_memory.choose(ppo, 1, int(23 * GIB))
        numbers.append(int(ppo.actor.gradient_checkpointing))
        assert ppo.critic.gradient_checkpointing != "auto" != ppo.critic.max_length_per_device
    assert numbers[0] < numbers[1]  # the reference lies beside the actor
    assert ppo.actor.gradient_checkpointing is ppo.critic.gradient_checkpointing is True


def test_auto_is_one_number_on_unequal_gpus_and_the_known_one_without(tmp_path, monkeypatch):
    """All processes choose for the smallest GPU. On a CPU, in an evaluation, and for a model that
    cannot be counted, all layers run again."""
    card = SimpleNamespace(total_memory=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(gpu_memory, "all_gather_objects", lambda _: [80 * GIB, 32 * GIB])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    config = make_config(tmp_path)
    gpu_memory.choose_for_device(config, torch.device("cuda"))
    assert config.actor.max_length_per_device == 16384
    evaluation = make_config(tmp_path, PPOConfig)
    evaluation.trainer.eval_only = True
    refused = make_config(tmp_path / "refused")
    AutoConfig.for_model("gemma2", num_hidden_layers=1).save_pretrained(tmp_path / "refused")
    for config, size in ((make_config(tmp_path), None), (evaluation, GIB), (refused, 80 * GIB)):
        lines = gpu_memory.choose(config, 1, size)
        assert config.actor.max_length_per_device == 8192
        assert config.actor.gradient_checkpointing is True
        assert ("softcap" in "".join(lines)) == (config is refused), lines


@pytest.mark.parametrize("has_teacher", [False, True])
def test_the_estimate_counts_the_models_beside_the_updated_one(tmp_path, has_teacher):
    config = make_config(tmp_path, PPOConfig, max_length_per_device=8192, entropy=0.01)
    config.adv.estimator, config.kl.coef, config.kl.type = "gae", 0.1, "loss"
    config.critic.offload_optimizer, config.critic.max_length_per_device = True, 8192
    config.data.prompts_per_rollout = 1000
    if has_teacher:
        config.teacher.model_name, config.teacher.kl = str(tmp_path), "full"
    trained, frozen = gpu_memory.measure(config, 2)
    for again in (False, True):
        config.actor.gradient_checkpointing = config.critic.gradient_checkpointing = again
        totals = []
        for name, model in trained.items():
            others = sum(trained[other].resting for other in trained if other != name)
            totals.append(frozen + others + model.updating(8192, again * len(model.layers)))
        plan = predict(config, 2)
        assert 1 <= max(totals) / plan.peaks["update"] < 1.25, (again, totals)


@pytest.mark.parametrize(
    ("gib", "world", "is_kept"), [(24, 1, True), (15, 1, False), (24, 2, True), (15, 2, False)]
)
def test_auto_keeps_weights_gathered_where_they_fit(tmp_path, gib, world, is_kept):
    config = make_config(tmp_path, max_length_per_device=8192)
    gpu_memory.choose(config, world, int(gib * GIB))
    assert config.actor.keep_gathered is is_kept
    before = asdict(config)
    assert gpu_memory.choose(config, world, int(gib * GIB)) == [] and asdict(config) == before


def make_large_config(folder) -> str:
    """A folder with the config of a model of 0.2e9 weights, and without any."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000}
    shapes.make_config("qwen3-0.6b", num_hidden_layers=2, **sizes).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def plan(capsys, monkeypatch):
    """Runs `rl2 plan`. Returns (status, stdout, stderr)."""
    monkeypatch.setenv("WORLD_SIZE", "1")  # or what the command sets would stay

    def run_here(*words):
        return run_main(main, *words), *capsys.readouterr()

    return run_here


def test_the_command_says_what_fits_and_what_needs_less(tmp_path, plan):
    """It reads config.json alone."""
    model = make_large_config(tmp_path / "model")
    arguments = [f"actor.model_name={model}", "actor.max_length_per_device=512"]
    arguments += ["data.max_length=400", "data.path=nowhere.jsonl", "data.batch_size=8"]
    gpu = ["--gpu-memory", "5"]  # 3 of them are for what is not a tensor
    status, output, errors = plan("sft", *gpu, *arguments)
    assert status == 1, errors
    rows = dict(re.findall(r"^(\w+) +([\d.]+) +[\d.]+ +[\d.]+$", output, re.MULTILINE))
    assert rows.keys() == {"load", "update", "step", "save"}
    # 16 bytes a weight in the step, and 12 between steps.
    assert float(rows["step"]) == pytest.approx(16 * 186.6e6 / 2**30, rel=0.1)
    assert "does not fit" in output and "offload_optimizer=true" in output
    status, output, _ = plan("sft", *gpu, *arguments, "--gpus", "4")
    assert status == 0 and "fits" in output.splitlines()[-1]


def test_a_layout_that_is_refused_is_a_problem_of_the_plan_too(tmp_path, plan):
    """And a model that the hub does not give is one message."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = run("-m", "rl2", "plan", "actor.model_name=nobody/none", env=offline, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: actor.model_name=nobody/none: there is no such folder")
    for arguments in (["pop"], ["--gpus", "0"], ["--gpu-memory", "-1"]):
        assert plan(*arguments)[0] == 2
    model = make_large_config(tmp_path / "model")
    status, _, errors = plan(f"actor.model_name={model}", "actor.tp_size=3", "--gpus", "8")
    assert status == 2 and "actor.tp_size=3 does not divide the 8 processes" in errors
