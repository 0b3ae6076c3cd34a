#!/usr/bin/env bash
# Runs everything that needs a GPU:
#     bash tests/gpu/run.sh [--list] [--out FOLDER] [--budget SECONDS] [PART ...]
#
# Every part runs in its own process with its own time limit, so a crash or a hang affects only
# that part. The figures of a part are printed as soon as it ends. They are also appended to
# benchmarks/results/gpu-DATE.md, or to a file in the folder of --out. The table comes last. The
# exit code is 1 if a part failed, 3 if there is no GPU, and 0 otherwise.
#
# The script installs nothing. It uses $PYTHON, or the python3 on the path, which must have rl2's
# requirements. The parts named sglang_* also need sglang.
# SGLANG_ARGS="attention_backend=triton ..." sets arguments of its engine. --budget limits the total
# time, for a machine that is lent for a number of seconds: a part starts only if time is left, and
# it may use no more than that time.
# RL2_DEVICE=cpu runs every part on a CPU with tiny shapes. This tests the parts, not the GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/sglang:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" tests/gpu/run.py "$@"
