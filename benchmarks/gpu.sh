#!/usr/bin/env bash
# What one GPU does:
#     bash benchmarks/gpu.sh [update] [long] [grpo] [trl] [key=value ...]
# - update: an update of 1.5B, its layers run again or not, compiled or not, in larger packs
# - long: updates of 0.6B with one long document a pack
# - grpo: a step of GRPO of 1.7B with SGLang. Its lines have the seconds from the start before them
# - trl: SFT and GRPO of a real model beside TRL's trainers, on the same card
# Without a name all of them run, each for some minutes. The keys are further ones of rl2's runs.
#
# RL2_GPU_MODELS is a folder where random models of real shapes stay between calls. RL2_GPU_GSM8K is
# the folder of a real model and of GSM8K, see tests/gpu/runs.py, which grpo and trl need.
# SGLANG_ARGS="attention_backend=triton ..." sets arguments of SGLang's engine.
# RL2_DEVICE=cpu rehearses everything with tiny shapes.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export RL2_GPU_MODELS="${RL2_GPU_MODELS:-$PWD/runs/gpu-models}"
mkdir -p "$RL2_GPU_MODELS"
python="${PYTHON:-python3}" gsm8k="${RL2_GPU_GSM8K:-}"
groups=() keys=()
for word in "$@"; do
    if [[ $word == *=* ]]; then keys+=("$word"); else groups+=("$word"); fi
done
((${#groups[@]})) || groups=(update long grpo trl)
document=2048 pack=8192 engine=(rollout.engine=sglang)
for argument in ${SGLANG_ARGS:-}; do engine+=("rollout.engine_args.$argument"); done
answers=(--prompts 16 --samples 16 --longest 512) texts=(--pack 4096 --rows 90 --steps 8)
if [[ ${RL2_DEVICE:-} == cpu ]]; then
    document=64 pack=128 engine=(rollout.engine=local)
    answers=(--prompts 2 --samples 4 --longest 8) texts=(--pack 256 --rows 6 --steps 3)
fi

run() { # a program and its arguments; prints the lines of its result
    echo "== $*"
    "$python" "$@" "${keys[@]}" 2> >(while IFS= read -r line; do echo "$SECONDS s  $line"; done >&2)
}
make_model() { # SHAPE
    "$python" -c "import tools; tools.make_model('$1')"
}
update() { # SHAPE and arguments
    make_model "$1"
    run benchmarks/update.py "$RL2_GPU_MODELS/$1" "${@:2}"
}

for group in "${groups[@]}"; do
    SECONDS=0
    case $group in
        update)
            for how in actor.gradient_checkpointing={true,auto} actor.compile=true; do
                update qwen2.5-1.5b --document $document --pack $pack "$how"
            done
            update qwen2.5-1.5b --document $document --pack auto
            ;;
        long)
            for length in $((2 * pack)) $((8 * pack)); do
                for how in actor.compile={false,true}; do
                    update qwen3-0.6b --document $length --pack $length --packs 1 "$how"
                done
            done
            ;;
        grpo)
            make_model qwen3-1.7b
            SECONDS=0
            run benchmarks/grpo_step.py "$RL2_GPU_MODELS/qwen3-1.7b" --libraries rl2 --data "$gsm8k/train.jsonl" \
                "${answers[@]}" trainer.deterministic=null data.max_length=2048 "${engine[@]}" \
                actor.max_length_per_device=auto actor.gradient_checkpointing=auto
            ;;
        trl)
            run benchmarks/sft.py "$gsm8k/model" --data "$gsm8k/train.jsonl" "${texts[@]}" \
                --checkpointing false --trl-batch 4
            run benchmarks/grpo_step.py "$gsm8k/model" --data "$gsm8k/train.jsonl" "${answers[@]}" \
                trainer.deterministic=null "${engine[@]}" actor.max_length_per_device=auto
            ;;
        *)
            echo "benchmarks/gpu.sh: there is no $group; there are update, long, grpo and trl" >&2
            exit 2
            ;;
    esac
done
