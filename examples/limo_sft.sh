#!/usr/bin/env bash
# SFT as in LIMO (arXiv:2502.03387): 817 worked solutions of competition mathematics, up to 16,384
# tokens each, 17 of them held out. The paper trains Qwen2.5-32B-Instruct; the model here is
# Qwen2.5-7B-Instruct. Learning rate, schedule, epochs and batch size are the paper's.
# Needs four GPUs of 80 GB, and a network for the model and the data. If all layers run again, `rl2
# plan` predicts at least 39 GiB per GPU in the update. Not run yet; SFT of SmolLM2-135M-Instruct
# has, on one H100 (benchmarks/results/2026-11-27-h100.md).
set -euo pipefail
cd "$(dirname "$0")/.."
python examples/data.py limo runs/data/limo
torchrun --standalone --nproc_per_node="${NUM_GPUS:-4}" -m rl2.trainer.sft \
    data.path=runs/data/limo/train.jsonl data.test_path=runs/data/limo/test.jsonl data.max_length=16384 \
    data.batch_size=64 \
    actor.model_name="${MODEL:-Qwen/Qwen2.5-7B-Instruct}" actor.lr=5e-6 actor.scheduler=cosine \
    actor.compile=true \
    actor.max_length_per_device=8192 actor.sp_size=2 \
    trainer.experiment_name=limo-7b-sft trainer.n_epochs=15 trainer.test_freq=13 trainer.save_freq=39 "$@"
