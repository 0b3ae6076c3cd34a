#!/usr/bin/env bash
# PPO as in Open-Reasoner-Zero (arXiv:2503.24290): Qwen2.5-7B with a critic and without KL, trained
# on 57,000 mathematical problems and tested on MATH-500.
# Needs a node of eight GPUs of 80 GB, sglang, and a network for the model and the data.
# If all layers run again, `rl2 plan` predicts at least 17 GiB per GPU for the trainer in the
# update, and nothing while SGLang generates. Not run yet.
# The rows themselves ask for \boxed{}, so data.system_prompt= leaves out the env's system prompt.
set -euo pipefail
cd "$(dirname "$0")/.."
python examples/data.py orz runs/data/orz
torchrun --standalone --nproc_per_node=8 -m rl2.trainer.ppo \
    data.path=runs/data/orz/train.jsonl data.test_path=runs/data/orz/test.jsonl data.max_length=1024 data.system_prompt= \
    data.prompts_per_rollout=128 data.responses_per_prompt=64 \
    actor.model_name="${MODEL:-Qwen/Qwen2.5-7B}" actor.lr=1e-6 actor.max_length_per_device=8192 actor.sp_size=2 \
    actor.compile=true \
    actor.offload_model=true actor.offload_optimizer=true actor.freeze_steps=4 \
    critic.lr=5e-6 critic.max_length_per_device=8192 critic.sp_size=2 critic.update_per_rollout=12 \
    critic.offload_model=true critic.offload_optimizer=true \
    adv.estimator=gae adv.gamma=1.0 adv.lamda=1.0 adv.norm_var=true \
    rollout.env_path=envs/boxed.py rollout.max_running=256 \
    rollout.train_sampling_params.max_new_tokens=8192 rollout.test_sampling_params.max_new_tokens=8192 \
    trainer.experiment_name=orz-7b-ppo trainer.test_freq=8 trainer.save_freq=16 "$@"
