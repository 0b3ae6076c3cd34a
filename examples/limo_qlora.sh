#!/usr/bin/env bash
# SFT on the data of LIMO (arXiv:2502.03387) with QLoRA: adapters of Qwen3-4B, whose base is in 4
# bits. 817 worked solutions of competition mathematics, up to 16,384 tokens each, 17 of them held out.
# Schedule and batch size are the paper's; the learning rate is for adapters.
# Needs one GPU of 24 GB, peft, bitsandbytes, and a network for the model and the data. If all
# layers run again, `rl2 plan` predicts 14 GiB in the update. Not run yet.
set -euo pipefail
cd "$(dirname "$0")/.."
python examples/data.py limo runs/data/limo
torchrun --standalone --nproc_per_node="${NUM_GPUS:-1}" -m rl2.trainer.sft \
    data.path=runs/data/limo/train.jsonl data.test_path=runs/data/limo/test.jsonl data.max_length=16384 \
    data.batch_size=64 \
    actor.model_name="${MODEL:-Qwen/Qwen3-4B}" actor.lora_rank=32 actor.quantize_base=nf4 \
    actor.lr=2e-4 actor.scheduler=cosine actor.max_length_per_device=16384 \
    trainer.experiment_name=limo-4b-qlora trainer.n_epochs=5 trainer.test_freq=13 trainer.save_freq=13 "$@"
