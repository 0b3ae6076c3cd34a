#!/usr/bin/env bash
# The tests without a GPU that take longest, which tests/run.sh leaves out: kills, tools, memory plans, rehearsals of the GPU suite, and
# whole runs of what shorter tests guard too.
# bash tests/nightly.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh test
export OMP_NUM_THREADS=1
# This one measures time and has both cores. Status 5: the arguments select none of its tests.
python -m pytest -x -q tests/test_faults.py "$@" || [ $? = 5 ]
options="-x -q --durations=10 -n 2 --max-worker-restart 0 --no-loadscope-reorder"
python -m pytest $options --dist loadfile tests/test_{env_command,gpu,memory_plan,compile}.py "$@"
# Those of other files have a mark. Status 5: the arguments select none of them.
marked=$(grep -l 'mark\.nightly' tests/test_*.py)
python -m pytest $options -m nightly $marked "$@" || [ $? = 5 ]
