#!/usr/bin/env bash
# A reward model on the 77,016 pairs of Skywork-Reward-Preference-80K-v0.2 (arXiv:2410.18451), from
# Qwen2.5-7B-Instruct. 512 pairs are held out. The data are the paper's; the keys are an untuned
# starting point. envs/reward_model.py scores the answers of PPO with the result.
# Needs four GPUs of 80 GB, and a network for the model and the data. If all layers run again, `rl2
# plan` predicts at least 35 GiB per GPU in the update. Not run yet.
set -euo pipefail
cd "$(dirname "$0")/.."
python examples/data.py skywork runs/data/skywork
torchrun --standalone --nproc_per_node="${NUM_GPUS:-4}" -m rl2.trainer.rm \
    data.path=runs/data/skywork/train.jsonl data.test_path=runs/data/skywork/test.jsonl data.max_length=4096 \
    data.batch_size=128 \
    critic.model_name="${MODEL:-Qwen/Qwen2.5-7B-Instruct}" critic.lr=2e-6 critic.scheduler=cosine \
    critic.warmup_ratio=0.03 critic.max_length_per_device=8192 critic.compile=true \
    trainer.experiment_name=skywork-7b-rm trainer.n_epochs=1 trainer.test_freq=100 trainer.save_freq=100 "$@"
