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
OMP_NUM_THREADS=1 python -m pytest -x -q --durations=15 --ignore tests/sglang --ignore tests/gpu tests "$@"
