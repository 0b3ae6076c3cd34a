#!/usr/bin/env bash
# REINFORCE on Countdown (make 24 from 1, 2, 3, 4) with Qwen2.5-3B-Instruct.
# Needs four GPUs of 40 GB or more, sglang, and a network for the model and the data. If all layers
# run again, `rl2 plan` predicts at least 17 GiB per GPU for the trainer in the update, and 9 GiB
# while SGLang generates. Not run yet.
set -euo pipefail
cd "$(dirname "$0")/.."
python examples/data.py countdown runs/data/countdown
torchrun --standalone --nproc_per_node="${NUM_GPUS:-4}" -m rl2.trainer.ppo \
    data.path=runs/data/countdown/train.jsonl data.test_path=runs/data/countdown/test.jsonl data.max_length=256 \
    data.prompts_per_rollout=128 data.responses_per_prompt=4 \
    actor.model_name="${MODEL:-Qwen/Qwen2.5-3B-Instruct}" actor.lr=1e-6 actor.max_length_per_device=8192 \
    actor.compile=true \
    rollout.env_path=envs/countdown.py rollout.max_running=256 \
    rollout.train_sampling_params.max_new_tokens=1024 rollout.test_sampling_params.max_new_tokens=1024 \
    trainer.experiment_name=countdown-3b trainer.max_steps=300 trainer.test_freq=20 trainer.save_freq=20 "$@"
