#!/usr/bin/env bash
# The tests without a GPU that take longest: tools, memory plans and rehearsals of the GPU suite. tests/run.sh leaves them out.
# bash tests/nightly.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh test
export OMP_NUM_THREADS=1
python -m pytest -x -q --durations=10 -n 2 --dist loadfile --no-loadscope-reorder \
    tests/test_{env_command,prove,gpu,memory_plan,fused}.py "$@"
