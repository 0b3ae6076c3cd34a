#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-1.5B-Instruct.
# Needs one GPU of 80 GB, sglang, and a network for the model and the data. NUM_GPUS=8 uses eight
# GPUs. If all layers run again, `rl2 plan` predicts at least 32 GiB for the trainer in the update,
# and 20 GiB while SGLang generates. Not run yet: neither its time nor its result is known. Its
# loop, environment and engine ran with SmolLM2-135M-Instruct on one H100
# (benchmarks/results/2026-11-27-h100.md).
set -euo pipefail
cd "$(dirname "$0")/.."
python examples/data.py gsm8k runs/data/gsm8k
torchrun --standalone --nproc_per_node="${NUM_GPUS:-1}" -m rl2.trainer.ppo \
    data.path=runs/data/gsm8k/train.jsonl data.test_path=runs/data/gsm8k/test.jsonl data.max_length=512 \
    data.prompts_per_rollout=64 data.responses_per_prompt=16 \
    actor.model_name="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}" actor.lr=1e-6 actor.max_length_per_device=16384 \
    actor.compile=true \
    actor.average=sequence adv.norm_var=true kl.coef=0.001 kl.type=loss \
    rollout.env_path=envs/gsm8k.py rollout.max_running=512 \
    rollout.train_sampling_params.max_new_tokens=1024 rollout.test_sampling_params.max_new_tokens=1024 \
    trainer.experiment_name=gsm8k-grpo trainer.n_epochs=2 trainer.test_freq=20 trainer.save_freq=20 "$@"
