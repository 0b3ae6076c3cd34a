#!/usr/bin/env bash
# Multi-turn search as in Search-R1 (arXiv:2503.09516): Qwen2.5-3B-Instruct on Natural Questions.
# Needs four GPUs of 80 GB, sglang, a network for the model and the data, and a retrieval server at
# RL2_SEARCH_URL: that of github.com/PeterGriffinJin/Search-R1, or any other with the interface that
# envs/search.py describes. Takes the memory of countdown.sh. Not run yet.
set -euo pipefail
cd "$(dirname "$0")/.."
url="${RL2_SEARCH_URL:-http://127.0.0.1:8000/retrieve}"
curl -sf -X POST -H 'Content-Type: application/json' -d '{"queries": ["x"], "topk": 1, "return_scores": true}' "$url" \
    >/dev/null || { echo "no retrieval server answers at $url: start one, or set RL2_SEARCH_URL" >&2; exit 1; }
python examples/data.py search runs/data/search
torchrun --standalone --nproc_per_node="${NUM_GPUS:-4}" -m rl2.trainer.ppo \
    data.path=runs/data/search/train.jsonl data.test_path=runs/data/search/test.jsonl data.max_length=512 \
    data.prompts_per_rollout=128 data.responses_per_prompt=5 \
    actor.model_name="${MODEL:-Qwen/Qwen2.5-3B-Instruct}" actor.lr=1e-6 actor.max_length_per_device=8192 \
    actor.compile=true \
    rollout.env_path=envs/search.py rollout.max_turns=4 rollout.max_running=256 \
    rollout.train_sampling_params.max_new_tokens=512 rollout.test_sampling_params.max_new_tokens=512 \
    'rollout.train_sampling_params.stop=["</search>"]' \
    trainer.experiment_name=search-3b trainer.max_steps=250 trainer.test_freq=25 trainer.save_freq=25 "$@"
