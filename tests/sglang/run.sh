#!/usr/bin/env bash
# The real SGLang on a CPU: makes .venv-sglang (3 GB, a few minutes, once) and runs the tests that need it.
# bash tests/sglang/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
env=.venv-sglang
wanted="$(cat tests/sglang/run.sh tests/sglang/stand_ins/*.p* tests/sglang/requirements.txt setup.py constraints.txt | cksum)"
if ! grep -qxF "$wanted" "$env/installed" 2>/dev/null; then
    echo "installing SGLang into $env (a few minutes) ..."
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    pip() { "$env/bin/python" -m pip install -qq "$@"; }
    pip "$(grep '^torch==' constraints.txt)" -r tests/sglang/requirements.txt
    # Without their dependencies: SGLang asks for CUDA packages and a newer torch, torchvision for its own torch.
    pip --no-deps sglang==0.5.23 torchvision==0.29.2
    pip --no-deps -e .
    # Found by the processes that SGLang spawns as well.
    cp -r tests/sglang/stand_ins/* "$("$env/bin/python" -c 'import site; print(site.getsitepackages()[0])')"
    echo "$wanted" >"$env/installed"
fi
OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -x -q --durations=10 tests/sglang "$@"
