"""Tries every causal language model of transformers as rl2 does at start and lists the verdicts.

    python tests/families.py [FAMILY ...]

Without families it writes docs/families.md; with families it prints their verdicts. No weights are
read: a small random copy of each architecture is made from the defaults of its config class, which
are those of a released model, and from the variants below.
"""

import signal
import sys
import time
import warnings

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM,
)

from rl2.model.admission import find_problem

LIMIT_SECONDS = 60
# Values that a config class has no default for: those of a released model.
NEEDED = {
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [4.0] * 48,
    "original_max_position_embeddings": 4096,
}
# Well-known settings that change what is computed: name -> (family, values).
VARIANTS = {
    "falcon (alibi)": ("falcon", {"alibi": True}),
    "granite (logits_scaling=8)": ("granite", {"logits_scaling": 8.0}),
    "lfm2 (convolutions)": ("lfm2", {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}),
    "mixtral (window)": ("mixtral", {"sliding_window": 4096}),
    "phi3 (longrope)": ("phi3", {"rope_parameters": LONGROPE, "max_position_embeddings": 131072}),
    "phi3 (window)": ("phi3", {"sliding_window": 2047}),
    "qwen2 (windows)": ("qwen2", {"use_sliding_window": True, "max_window_layers": 20}),
    "starcoder2 (window)": ("starcoder2", {"sliding_window": 4096}),
}


def make_config(name):
    """The config of a family or of a variant."""
    family, values = VARIANTS.get(name, (name, NEEDED.get(name, {})))
    return AutoConfig.for_model(family, **values)


def verdict(name, critic=False):
    """Why rl2 refuses the family, None if it trains it."""

    def stop(number, frame):
        raise TimeoutError(f"more than {LIMIT_SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        return find_problem(make_config(name), critic)
    except Exception as error:
        return f"its default config does not work ({type(error).__name__})"
    finally:
        signal.alarm(0)


def main():
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    names = sys.argv[1:] or [*CAUSAL_LM, *VARIANTS]
    for name in names:
        start = time.monotonic()
        reason = verdict(name)
        print(f"{name:30} {time.monotonic() - start:5.1f} s  {reason or 'passes'}", flush=True)


if __name__ == "__main__":
    main()
