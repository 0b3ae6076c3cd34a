#!/usr/bin/env bash
# Hardware: any CPU with two cores and 8 GB of memory. Installs rl2, fetches SmolLM2-135M-Instruct and trains it four times:
# SFT on worked word problems (reasoning-gym's gsm_symbolic, 9 kinds with small numbers); from that, a reward model and DPO on
# pairs; and GRPO on the quickstart's sums. Held-out problems are of the same kinds, with other numbers and names.
# A pair is the worked answer and, in turns, the same with a slip in its last step, as long to the character, or the right
# answer to another problem of the kind. Choosing the shorter one is right for 56% of the held-out pairs.
#
# Measured before and after on 100 held-out problems (GRPO: 50 sums), 21 November 2026, in a fresh clone on two cores of an
# AMD EPYC with AVX512-BF16; all of it took 16 minutes:
#   SFT            perplexity   3.16 -> 1.06    184 s
#   reward model   accuracy     ties -> 0.82    197 s
#   DPO            accuracy     ties -> 0.91    245 s
#   GRPO           right        0.34 -> 0.70    241 s, greedy; sampled 0.27 in the first step, 0.69 over the last five
#
# Safe to run again: a stage that is done stays, an interrupted one goes on from its last checkpoint. OUT is where the
# stages go, MODEL=owner/name another model, DATA a folder with your own {sft,pairs}_{train,test}.jsonl.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh quickstart

out="${OUT:-runs/pipeline}" data="${DATA:-runs/pipeline-data}" sums=runs/quickstart-data
model="${MODEL:-$sums/model}"
[ -n "${DATA:-}" ] || python examples/pipeline.py prepare "$data"
python examples/quickstart.py prepare "$sums"
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}" TOKENIZERS_PARALLELISM=false
# Large tensors come and go at every layer: their memory is kept instead of being returned and cleared each time.
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
