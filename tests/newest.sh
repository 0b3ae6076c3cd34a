#!/usr/bin/env bash
# The newest versions that setup.py allows, in two environments: .venv-newest has the newest torch and transformers that pip
# finds, .venv-sglang those that the newest SGLang asks for, which is what an installation with SGLang gets. The first call
# makes both in a few minutes (12 GB). bash tests/newest.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
engine_files=(tests/test_{checkpoint,engine,mesh,head,sglang_engine}.py)
run_tests() { # run_tests ENVIRONMENT [pytest arguments]
    local python=$1/bin/python
    shift
    "$python" -c 'import torch, transformers as t; print("torch", torch.__version__, "transformers", t.__version__)'
    # The longest tests run with the tested versions alone.
    OMP_NUM_THREADS=1 "$python" -m pytest -x -q -m "not nightly" --durations=10 -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder "$@"
}

env=.venv-newest
fingerprint="$(cat tests/newest.sh setup.py constraints.txt | cksum)"
if ! grep -qxF "$fingerprint" "$env/installed" 2>/dev/null; then
    echo "installing rl2 with the newest torch and transformers into $env (a few minutes) ..."
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    grep -vE '^(torch|transformers|tokenizers|huggingface_hub|setuptools)==' constraints.txt >"$env/constraints.txt"
    "$env/bin/python" -m pip install -qq --upgrade -c "$env/constraints.txt" \
        bitsandbytes hypothesis peft pytest pytest-xdist torch transformers -e .
    echo "$fingerprint" >"$env/installed"
fi
run_tests "$env" tests/test_{trainer,worker,gpu_paths}.py "${engine_files[@]}" "$@"

# Its versions are between the oldest and the newest, so what the engine needs is enough.
source tests/sglang/install.sh # sets env
run_tests "$env" "${engine_files[@]}" "$@"
