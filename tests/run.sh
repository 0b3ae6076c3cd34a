#!/usr/bin/env bash
# Installs rl2 with its test dependencies into .venv, checks format, style, types and imports, and runs the tests that need no GPU. The
# longest ones are in tests/nightly.sh.
# bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh test
ruff check .
ruff format --check .
# Once more if it has crashed: CPython 3.11 may fail to parse a file, and parse it the next time.
mypy || if [ $? = 2 ]; then mypy; else exit 1; fi
lint-imports --no-logo --no-cache
python tests/sizes.py
OMP_NUM_THREADS=1 python tests/entered.py
# One thread a process: several processes run at once, and threads that share a core wait for each other.
export OMP_NUM_THREADS=1
options="-x -q --durations=15"
# Most tests use one core, so two files of them run at a time. The longest come first, so that both cores end together: a file that
# is named twice runs where it is named first. A process that crashes ends the tests: xdist would start another one, go on in
# spite of -x, and hang at the end.
others=$(ls tests/test_*.py | grep -vE '(compile|env_command|faults|gpu|memory_plan)\.py')
python -m pytest $options -m "not nightly" -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder \
    tests/test_{trainer,worker,examples,config,replay,exact,overlap,attention,run_folder,special_models,console_lost,sandbox,checkpoint}.py \
    tests/test_{engine,endpoint,ready_envs,windows,api,repo}.py $others "$@"
