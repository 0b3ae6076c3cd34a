#!/usr/bin/env bash
# Installs rl2 with its test dependencies into .venv, checks format, style and types, and runs every test that needs no GPU.
# bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh test
ruff check .
ruff format --check .
mypy
# One thread a process: several processes run at once, and threads that share a core wait for each other.
export OMP_NUM_THREADS=1
options="-x -q --durations=15 --ignore tests/sglang --ignore tests/gpu --ignore tests/cuda"
# These two have both cores: one measures time, the other prints the budgets. Status 5: the arguments select none of their tests.
alone="tests/test_faults.py tests/test_repo.py"
python -m pytest $options $alone "$@" || [ $? = 5 ]
# Most tests use one core, so two files of them run at a time. The longest come first, so that both cores end together: files that
# are named twice run where they are named first.
longest=$(printf "tests/test_%s.py " trainer worker gpu examples checkpoint templates engine)
python -m pytest $options -n 2 --dist loadfile --no-loadscope-reorder $(printf -- "--ignore %s " $alone) \
    $longest tests/test_*.py "$@"
