#!/usr/bin/env bash
# The CUDA paths without a GPU: makes .venv-cuda with torch's CUDA build (5 GB, a few minutes, once) and runs tests/cuda on fake
# CUDA tensors. TORCH=2.11.0 takes another release of torch into .venv-cuda-2.11.0.
# [TORCH=release] bash tests/cuda/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
env=.venv-cuda${TORCH:+-$TORCH}
torch="torch==${TORCH:-$(sed -n 's/^torch==//p' constraints.txt)}"
wanted="$torch $(cat tests/cuda/run.sh setup.py constraints.txt | cksum)"
if ! grep -qxF "$wanted" "$env/installed" 2>/dev/null; then
    echo "installing rl2 with the CUDA build of $torch into $env (a few minutes) ..."
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    # Another release of torch may need another release of setuptools.
    grep -vE '^(torch|setuptools)==' constraints.txt >"$env/constraints.txt"
    echo "$torch" >>"$env/constraints.txt"
    pip() { "$env/bin/python" -m pip install -qq -c "$env/constraints.txt" "$@"; }
    # PyPI has the CUDA build of torch. Where pip is told of other places, those may have a CPU build, which pip would prefer.
    PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= PIP_EXTRA_INDEX_URL= pip "$torch"
    "$env/bin/python" -c 'import torch; assert torch.version.cuda, f"torch {torch.__version__} is no CUDA build"'
    pip pytest pytest-xdist peft -e .
    echo "$wanted" >"$env/installed"
fi
OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -x -q --durations=10 -n 2 --max-worker-restart 0 --dist loadfile tests/cuda "$@"
