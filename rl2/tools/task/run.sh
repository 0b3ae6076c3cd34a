#!/usr/bin/env bash
# Trains a model on the rows of train.jsonl with the rewards of env.py, in runs/first. It needs no GPU.
# MODEL=FOLDER or MODEL=OWNER/NAME trains another model. Arguments are added to the keys below:
#     bash run.sh trainer.max_steps=2
# `rl2 ppo --help` explains the keys. For several GPUs, write torchrun --nproc_per_node=N in place of
# python.
set -euo pipefail
cd "$(dirname "$0")"

python -m rl2.trainer.ppo \
    data.path=train.jsonl data.test_path=test.jsonl data.max_length=256 \
    data.prompts_per_rollout=3 data.responses_per_prompt=8 \
    actor.model_name="${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}" actor.lr=1e-5 \
    rollout.env_path=env.py rollout.train_sampling_params.max_new_tokens=32 \
    trainer.n_epochs=10 trainer.experiment_name=first "$@"
