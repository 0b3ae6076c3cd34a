#!/usr/bin/env bash
# The real SGLang on a CPU, with the versions that it asks for. bash tests/sglang/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/sglang/install.sh
# With a CUDA build of torch SGLang would start NCCL for tensor parallelism on a CPU.
export SGLANG_NCCL_SO_PATH=/dev/null
OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -x -q --durations=10 tests/sglang "$@"
