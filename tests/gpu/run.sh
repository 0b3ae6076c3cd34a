#!/usr/bin/env bash
# What needs a GPU, in one command: bash tests/gpu/run.sh [--list] [--out FOLDER] [--budget SECONDS] [PART ...]
#
# Every part runs in a process of its own, with its own time limit: a crash or a hang costs that part only. What it found
# is printed, and appended to benchmarks/results/gpu-DATE.md (or to the folder given), as soon as it ends; the table comes
# last. The exit code is 1 if a part failed, 0 otherwise, and 3 where there is no GPU.
#
# Nothing is installed: it takes PYTHON, or the python on the path, with rl2's requirements in it (sglang for the parts
# named sglang_*; SGLANG_ARGS="attention_backend=triton ..." reaches its engine). --budget fits it into a machine lent for
# so many seconds: a part starts only if something is left, and may use no more than that.
# RL2_DEVICE=cpu runs every part on a CPU with tiny shapes: that proves the parts, not the GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/sglang:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" tests/gpu/run.py "$@"
