#!/usr/bin/env bash
# DPO on UltraFeedback with the settings of Zephyr (arXiv:2310.16944, config_full.yaml of the alignment
# handbook): zephyr-7b-sft-full on 61,135 pairs, tested on 512 of the 2,000 test pairs. The handbook
# cuts pairs to 1,024 tokens; rl2 drops longer rows, so data.max_length is 2,048.
# Needs four GPUs of 80 GB, and a network for the model and the data. If all layers run again, `rl2
# plan` predicts at least 39 GiB per GPU in the update. Not run yet.
set -euo pipefail
cd "$(dirname "$0")/.."
python examples/data.py ultrafeedback runs/data/ultrafeedback
torchrun --standalone --nproc_per_node="${NUM_GPUS:-4}" -m rl2.trainer.dpo \
    data.path=runs/data/ultrafeedback/train.jsonl data.test_path=runs/data/ultrafeedback/test.jsonl \
    data.max_length=2048 data.batch_size=128 \
    actor.model_name="${MODEL:-alignment-handbook/zephyr-7b-sft-full}" actor.lr=5e-7 actor.scheduler=cosine \
    actor.compile=true \
    actor.warmup_ratio=0.1 actor.max_length_per_device=8192 dpo.beta=0.01 \
    trainer.experiment_name=zephyr-7b-dpo trainer.n_epochs=1 trainer.test_freq=100 trainer.save_freq=100 "$@"
