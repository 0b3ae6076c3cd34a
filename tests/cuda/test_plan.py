"""The memory plan counts what fake CUDA tensors count: the same code runs on two kinds of fakes."""

import pytest
from configs import resolved
from fake_cuda import fake_cuda
from shapes import make_config
from torch._subclasses.fake_tensor import unset_fake_temporarily

from rl2.config.schema import DPOConfig, PPOConfig, SFTConfig
from rl2.tools import memory as plan
from rl2.tools.planned_device import MemoryTracker

JOBS = {
    "critic and reference": (4, PPOConfig, {}),
    "ring and tensor parallel": (8, SFTConfig, {"sp_size": 2, "tp_size": 2}),
    "all in host memory": (2, SFTConfig, {"offload_model": True, "offload_optimizer": True}),
    "adapters": (2, DPOConfig, {"lora_rank": 4}),
}


@pytest.mark.parametrize("job", JOBS)
def test_the_plan_and_fake_gpus_agree(tmp_path, monkeypatch, job):
    world, kind, keys = JOBS[job]
    make_config("small").save_pretrained(tmp_path)
    config = kind()
    sections = [config.actor]
    if kind is PPOConfig:
        config.adv.estimator = "gae"
        config.kl.coef = 0.1
        config.kl.type = "loss"
        sections.append(config.critic)
    for section in sections:
        section.model_name = str(tmp_path)
        section.max_length_per_device = 2048
        section.dither_weights = False  # as in every plan
        vars(section).update(keys)
    config = resolved(config)
    full_batch = plan.full_batch

    def full_batch_on_host(*arguments, **keywords):
        with unset_fake_temporarily():
            return full_batch(*arguments, **keywords)

    with monkeypatch.context() as patch, fake_cuda(world) as gpu:
        patch.setattr(plan, "full_batch", full_batch_on_host)
        with MemoryTracker(gpu.device) as memory:
            on_gpu = plan.run_phases(config, memory, gpu.device)
    planned = plan.predict(config, world)
    assert planned.engine_weights == on_gpu.engine_weights
    assert planned.peaks == pytest.approx(on_gpu.peaks, rel=0.02)
    assert planned.steady == pytest.approx(on_gpu.steady, rel=0.02)
    print(job, planned.peaks, on_gpu.peaks)
