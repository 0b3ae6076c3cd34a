#!/usr/bin/env bash
# Installs rl2, fetches SmolLM2-135M-Instruct and trains it with GRPO to name the largest of four
# numbers. Needs two CPU cores and 8 GB of memory.
# Afterwards, `source .venv/bin/activate` activates the environment that this script made.
# If you run it again, nothing is fetched or installed twice. MODEL=owner/name trains another model of
# the Hugging Face hub, SEED=1 makes another run, and key=value arguments override the keys below.
# PROCESSES=2 starts two processes with half of the threads each: a tenth slower on two quiet cores,
# but three times as fast beside two busy programs, and with twice the memory for weights.
set -euo pipefail
cd "$(dirname "$0")/.."
processes="${PROCESSES:-1}"
[[ $processes =~ ^[1-9][0-9]*$ ]] || { echo "PROCESSES=$processes: set a whole number, 1 or more" >&2; exit 1; }
source examples/install.sh quickstart

out="${OUT:-runs/quickstart}"
python examples/quickstart.py prepare runs/quickstart-data ${MODEL:+--no-model}
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
threads=$((cores < processes ? 1 : cores / processes))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}" TOKENIZERS_PARALLELISM=false
# A thread that waits for the others keeps its core busy for a while. A short while leaves the core
# to other programs, which the others may be waiting for.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
# Large tensors are allocated and freed at every layer. Keeping their memory instead of returning it
# to the system saves a tenth of the time.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000

torchrun --standalone --nproc_per_node="$processes" -m rl2.trainer.ppo \
    data.path=runs/quickstart-data/train.jsonl data.test_path=runs/quickstart-data/test.jsonl data.max_length=64 \
    data.prompts_per_rollout=8 data.responses_per_prompt=8 data.seed="${SEED:-0}" \
    actor.model_name="${MODEL:-runs/quickstart-data/model}" actor.lr=4e-5 actor.scheduler=linear \
    actor.max_length_per_device=4096 actor.gradient_checkpointing=false \
    rollout.env_path=examples/quickstart_env.py rollout.max_running=128 \
    rollout.train_sampling_params.max_new_tokens=10 rollout.test_sampling_params.max_new_tokens=10 \
    adv.norm_var=true trainer.max_steps=24 trainer.seed="${SEED:-0}" \
    trainer.save_dir="$out" trainer.experiment_name=quickstart trainer.disable_wandb=true "$@"

python examples/quickstart.py report "$out"
