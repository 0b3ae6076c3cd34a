#!/usr/bin/env bash
# The real vLLM on a CPU, with the versions that it asks for. bash tests/vllm_cpu/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/vllm_cpu/install.sh
OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -x -q --durations=10 tests/vllm_cpu "$@"
