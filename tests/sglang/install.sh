# To be sourced in the root of the checkout: makes .venv-sglang (7 GB, a few minutes, once), with SGLang and the torch,
# transformers and huggingface_hub that it asks for, and sets `env`.
env=.venv-sglang
wanted="$(cat tests/sglang/install.sh tests/sglang/requirements.txt setup.py | cksum)"
if ! grep -qxF "$wanted" "$env/installed" 2>/dev/null; then
    echo "installing SGLang into $env (a few minutes) ..."
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    pip() { "$env/bin/python" -m pip install -qq "$@"; }
    pip -r tests/sglang/requirements.txt
    # Without their dependencies, since SGLang asks for kernels that need a GPU.
    pip --no-deps sglang==0.5.23 -e .
    "$env/bin/python" tests/sglang/check_pins.py
    # Found by the processes that SGLang spawns as well.
    cp -r tests/sglang/stand_ins/* "$("$env/bin/python" -c 'import site; print(site.getsitepackages()[0])')"
    echo "$wanted" >"$env/installed"
fi
