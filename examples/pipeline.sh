#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh quickstart

out="${OUT:-runs/pipeline}" data="${DATA:-runs/pipeline-data}" sums=runs/quickstart-data
model="${MODEL:-$sums/model}"
[ -n "${DATA:-}" ] || python examples/pipeline.py prepare "$data"
python examples/quickstart.py prepare "$sums"
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}" TOKENIZERS_PARALLELISM=false
# Large tensors come and go at every layer: keeping their memory mapped instead of returning it saves a tenth of the time.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000

# stage NAME arguments of torchrun: nothing if it is done; else it begins, or goes on from its last checkpoint.
stage() {
    local folder="$out/$1"
    [ ! -e "$folder/done" ] || { echo "$1 is done: $folder/model" && return; }
    echo "== $1"
    torchrun --standalone --nproc_per_node=1 "${@:2}" data.max_length=512 trainer.save_dir="$folder" \
        trainer.experiment_name="$1" trainer.disable_wandb=true trainer.save_freq=10 trainer.keep_checkpoints=1
    touch "$folder/done"
    rm -rf "$folder/checkpoints"
}

stage sft -m rl2.trainer.sft data.path="$data/sft_train.jsonl" data.test_path="$data/sft_test.jsonl" \
    actor.model_name="$model" actor.lr=1e-4 actor.scheduler=linear actor.gradient_checkpointing=false \
    data.batch_size=16 actor.max_length_per_device=4096 trainer.n_epochs=1

stage rm -m rl2.trainer.rm data.path="$data/pairs_train.jsonl" data.test_path="$data/pairs_test.jsonl" \
    critic.model_name="$out/sft/model" critic.lr=1e-4 critic.scheduler=linear critic.gradient_checkpointing=false \
    data.batch_size=8 critic.max_length_per_device=4096 trainer.n_epochs=1

stage dpo -m rl2.trainer.dpo data.path="$data/pairs_train.jsonl" data.test_path="$data/pairs_test.jsonl" \
    actor.model_name="$out/sft/model" actor.lr=2e-5 actor.scheduler=linear actor.gradient_checkpointing=false \
    data.batch_size=16 actor.max_length_per_device=4096 trainer.n_epochs=1

stage grpo -m rl2.trainer.ppo data.path="$sums/train.jsonl" data.test_path="$sums/test.jsonl" \
    data.prompts_per_rollout=16 data.responses_per_prompt=8 actor.model_name="$out/sft/model" actor.lr=3e-5 \
    actor.max_length_per_device=4096 actor.gradient_checkpointing=false adv.norm_var=true \
    rollout.env_path=envs/arithmetic.py rollout.max_running=128 \
    rollout.train_sampling_params.max_new_tokens=32 rollout.test_sampling_params.max_new_tokens=32 \
    trainer.n_epochs=4 trainer.max_steps=20

python examples/pipeline.py report "$out"
echo "this call took $((SECONDS / 60)) minutes $((SECONDS % 60)) seconds"
