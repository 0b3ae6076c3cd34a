"""Weights and optimizer state in host memory: what moves, what waits, and what is on the GPU."""

import torch
from fake_cuda import SLACK_BYTES, WAITS_OF_AN_UPDATE, fake_cuda, optimizer_devices, policy_loss

TOKENS = 512
OFFLOADED = {"offload_model": True, "offload_optimizer": True}


def fp32_bytes(worker):
    return sum(4 * parameter.numel() for parameter in worker.model.parameters())


def test_only_what_changed_is_copied_back_and_nothing_waits():
    with fake_cuda() as gpu:
        worker = gpu.worker(max_length_per_device=TOKENS, **OFFLOADED)
        batch = gpu.batch(worker, TOKENS, packs=2)
        size = fp32_bytes(worker)
        assert gpu.bytes < SLACK_BYTES and gpu.host_bytes < 3 * size + SLACK_BYTES
        scores_bytes = batch.mask.numel() * 4
        for _ in range(2):
            with gpu.phase() as phase:
                worker.infer(batch)
            assert phase.copied_bytes["to host"] == scores_bytes
            assert phase.num_waits == 1, phase.describe_waits()
            with gpu.phase() as phase:
                worker.update(batch, policy_loss)
            assert phase.num_waits <= WAITS_OF_AN_UPDATE, phase.describe_waits()
            assert 3 * size <= phase.copied_bytes["to host"] < 3 * size + 100
            # The moments come while the step goes on.
            assert phase.side_stream_bytes == {"to device": 2 * size}
            with gpu.phase() as phase:
                for _, weight in worker.iter_full_weights(torch.bfloat16):
                    del weight
            assert phase.copied_bytes == {"to device": size} and phase.num_waits == 0
            assert gpu.bytes < SLACK_BYTES


def test_adapters_go_back_and_frozen_weights_do_not():
    with fake_cuda() as gpu:
        worker = gpu.worker(max_length_per_device=TOKENS, lora_rank=4, **OFFLOADED)
        batch = gpu.batch(worker, TOKENS)
        trained = sum(4 * parameter.numel() for parameter in worker.trained_parameters.values())
        with gpu.phase() as phase:
            worker.update(batch, policy_loss)
        assert 3 * trained <= phase.copied_bytes["to host"] < 3 * trained + 100


def test_a_checkpoint_of_state_in_host_memory_takes_no_memory_of_the_gpu():
    """Neither before the first update nor after it, while it is saved and restored."""
    for keys in {"offload_optimizer": True}, OFFLOADED:
        with fake_cuda() as gpu:
            worker = gpu.worker(max_length_per_device=TOKENS, **keys)
            batch = gpu.batch(worker, TOKENS)
            for _ in range(2):
                with gpu.phase() as phase:
                    state = worker.state_dict()
                    worker.load_state_dict(state)
                assert phase.peak_bytes <= phase.start_bytes + SLACK_BYTES
                assert optimizer_devices(worker) == {"exp_avg": {"cpu"}, "exp_avg_sq": {"cpu"}}
                worker.update(batch, policy_loss)


def test_ranks_that_do_not_read_the_model_have_no_host_copy_of_it():
    with fake_cuda(world=8, rank=1) as gpu, gpu.phase() as phase:
        gpu.worker()
    assert phase.host_peak_bytes < SLACK_BYTES
    assert phase.copied_bytes["to device"] < SLACK_BYTES
