"""gradient_checkpointing=auto: as many layers are recomputed as the predicted memory asks."""

from dataclasses import replace

import pytest
import torch
from common import make_model

from rl2.config.schema import SFTActorConfig, SFTConfig
from rl2.run import memory_plan
from rl2.run.memory_plan import USABLE_SHARE, choose_checkpointing, recomputed_layers
from rl2.tools.plan import predict

NUM_LAYERS = 3


@pytest.fixture
def config(tmp_path):
    """A config with auto."""
    name = make_model(tmp_path / "model", num_hidden_layers=NUM_LAYERS, intermediate_size=256)
    config = SFTConfig()
    config.data.max_length = 512
    config.actor = SFTActorConfig(
        model_name=name,
        dtype="bfloat16",
        gradient_checkpointing="auto",
        max_length_per_device=4096,
    )
    return config


def test_a_plan_leaves_the_functions_of_torch_as_they_were(config):
    """With another torch.tensor in torch's list, models that load later were not initialized."""
    torch.utils._device._device_constructors.cache_clear()  # as in a new process
    predict(config, 1)
    with torch.device("meta"):
        assert torch.tensor([]).is_meta


def test_the_fewest_layers_that_fit_are_recomputed(config, capsys, monkeypatch):
    plans = {}  # made in this process, by the number of layers that are recomputed
    for number in range(NUM_LAYERS + 1):
        actor = replace(config.actor, gradient_checkpointing=number)
        plans[number] = predict(replace(config, actor=actor), 1)
    peaks = [plan.peaks["update"] for plan in plans.values()]
    assert peaks[0] > 2 * peaks[-1]

    def start_process(config, num_gpus):
        return plans[NUM_LAYERS * config.actor.gradient_checkpointing]

    monkeypatch.setattr(memory_plan, "start_process", start_process)
    monkeypatch.setattr(memory_plan, "read_plan", lambda plan: plan)
    for usable, numbers in (
        (peaks[0], {0}),
        (peaks[1], {1, 2}),  # the line between the plans of none and all may be above the curve
        (peaks[2], {2, 3}),
        (peaks[-1] // 2, {NUM_LAYERS}),
    ):
        number = recomputed_layers(config, 1, usable / USABLE_SHARE + 1)
        assert number in numbers
        assert f"auto: {number} of 3 layers are recomputed" in capsys.readouterr().out


def test_without_a_plan_all_layers_are_recomputed(config, monkeypatch):
    monkeypatch.setattr(memory_plan, "start_process", lambda config, num_gpus: None)
    monkeypatch.setattr(memory_plan, "read_plan", lambda process: None)
    assert recomputed_layers(config, 1, 2**40) is True


def test_without_a_gpu_and_without_auto_nothing_is_predicted(config, monkeypatch):
    monkeypatch.setattr(memory_plan, "start_process", pytest.fail)
    assert choose_checkpointing(config) is config
    monkeypatch.setattr(memory_plan.torch.cuda, "is_available", lambda: True)
    plain = replace(config, actor=replace(config.actor, gradient_checkpointing=2))
    assert choose_checkpointing(plain) is plain


def test_every_process_gets_the_number_of_the_first(config, monkeypatch):
    """In a copy: the user's config stays as it is."""
    monkeypatch.setattr(memory_plan.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory_plan, "recomputed_layers", pytest.fail)
    monkeypatch.setattr(memory_plan, "broadcast_object", lambda value: 2)
    monkeypatch.setenv("RANK", "1")
    chosen = choose_checkpointing(config)
    assert chosen.actor.gradient_checkpointing == 2
    assert config.actor.gradient_checkpointing == "auto"
