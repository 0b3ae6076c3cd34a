#!/usr/bin/env bash
# The oldest versions that setup.py allows: runs the tests that touch torch and transformers. The first call makes .venv-oldest
# from constraints.txt with these releases, in a few minutes (5 GB). bash tests/oldest.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
env=.venv-oldest torch=torch==2.11.0 transformers=transformers==5.12.1
fingerprint="$(cat tests/oldest.sh setup.py constraints.txt | cksum)"
if ! grep -qxF "$fingerprint" "$env/installed" 2>/dev/null; then
    echo "installing rl2[test] with $torch and $transformers into $env (a few minutes) ..."
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    # These need older releases of the packages that are left out here: pip chooses them.
    {
        grep -vE '^(torch|setuptools|transformers|tokenizers|huggingface_hub)==' constraints.txt
        echo "$torch"
        echo "$transformers"
    } >"$env/constraints.txt"
    "$env/bin/python" -m pip install -qq -c "$env/constraints.txt" -e ".[test]"
    echo "$fingerprint" >"$env/installed"
fi
# The longest tests run with the tested versions alone.
files=(tests/test_{trainer,worker,checkpoint,engine,examples,head,chat,templates,data,lora,rollout,env_objects,mesh}.py)
OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -x -q -m "not nightly" --durations=10 -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder "${files[@]}" "$@"
