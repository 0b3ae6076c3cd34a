#!/usr/bin/env bash
# Runs everything that needs a GPU:
#     bash tests/gpu/run.sh [--list] [--out FOLDER] [PART ...]
#
# Every part runs in its own process with its own time limit, so a crash or a hang affects only
# that part and those that need it: they are skipped at once. The figures of a part are printed as
# soon as it ends. They are also appended to benchmarks/results/gpu-DATE.md, or to a file in the
# folder of --out. The exit code is 1 if a part failed, 3 if there is no GPU, and 0 otherwise.
#
# The script installs nothing. It uses $PYTHON, or the python3 on the path, which must have rl2's
# requirements. The parts named sglang* also need sglang, and vllm_contract needs vllm.
# SGLANG_ARGS="attention_backend=triton ..." sets arguments of its engine.
#
# RL2_GPU_MODELS is a folder where the models stay between calls. RL2_GPU_GSM8K is the folder of the
# part gsm8k, see runs.py: with a real model, and rows.
#
# RL2_DEVICE=cpu rehearses the parts on a CPU with tiny shapes. This tests the parts, not the GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/sglang:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" tests/gpu/run.py "$@"
