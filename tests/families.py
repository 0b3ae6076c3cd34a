"""Tries the language models of transformers as rl2 does at start and lists the verdicts.

    python tests/families.py [FAMILY ...]

With families it prints their verdicts. Without, which takes many minutes, it writes families.json
and docs/models.md, and ends with status 1 if a family that was trained is now refused, or the
other way round. No weights are read: a small random copy of each architecture is made from the
defaults of its config class, which mostly are those of a released model, and from the variants
below. What is trained also generates in the embedded engine, which must give the log-probabilities
of transformers.
"""

import json
import signal
import sys
import tempfile
import time
import warnings
from datetime import date

import torch
import transformers
from common import ROOT
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS,
)

from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.local import LocalEngine
from rl2.model.admission import SCORE_TOLERANCE, find_problem, make_plain
from rl2.model.classes import language_model_class
from rl2.model.shrink import FIRST_PLAIN_TOKEN, VOCABULARY, shrink

sys.path.insert(0, str(ROOT / "docs"))
import generate  # noqa: E402

LIMIT_SECONDS = 20
# Values that a config class has no default for: those of a released model.
NEEDED = {
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "qwen2_5_vl": {"vision_config": {"hidden_size": 1280, "intermediate_size": 3420}},
}
# Models with a vision or audio tower that are no causal language models by their class.
TOWERS = """
aria deepseek_vl fun_asr_nano glm_ocr glmasr granite_docling granite_speech idefics2 idefics3
internvl janus kimi_k25 lfm2_vl lighton_ocr llava llava_next llava_onevision mistral3 mistral4
molmo2 paddleocr_vl paligemma qianfan_ocr qwen2_5_vl qwen2_audio qwen2_vl qwen3_asr qwen3_vl
qwen3_vl_moe smolvlm
""".split()
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


def engine_problem(name):
    """What the embedded engine does wrong with the family, None if nothing."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        torch.manual_seed(0)
        config = make_config(name)
        model_class = language_model_class(config)
        plain = make_plain(model_class, shrink(model_class, config))
        try:
            plain.save_pretrained(folder)
            AutoConfig.from_pretrained(folder)
        except Exception:  # of several types: some configs check that their parts fit each other
            return "not tried: transformers does not read the config of a small copy"
        prompt = torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (20,)).tolist()
        try:
            settings = EngineSettings(
                model_name=folder, dtype=torch.float32, device=torch.device("cpu")
            )
            engine = LocalEngine(settings)
            engine.verify_weights(plain.state_dict().items(), 0)
            params = SamplingParams(max_new_tokens=24)
            answer = engine.loop.run_until_complete(engine.generate(prompt, params, (0,)))
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    tokens = torch.tensor([prompt + answer.tokens])
    with torch.no_grad():
        log_p = plain(tokens[:, :-1], use_cache=False).logits[0].log_softmax(-1)
    expected = log_p.gather(1, tokens[0, 1:, None])[len(prompt) - 1 :, 0]
    difference = (expected - torch.tensor(answer.logps)).abs().max()
    if difference > SCORE_TOLERANCE:
        return f"its log-probabilities differ by up to {difference:.2g}"
    return None


def try_family(name):
    """A reason for each of refused, critic and engine that fails. A refused family has one only."""
    refused = verdict(name)
    if refused is not None:
        return {"refused": refused}
    reasons = {"critic": "transformers has no such class", "engine": engine_problem(name)}
    if make_config(name).model_type in CLASSIFIERS:
        reasons["critic"] = verdict(name, critic=True)
    return {part: reason for part, reason in reasons.items() if reason is not None}


def read_record():
    """The verdicts of the last complete run: family or variant -> as `try_family` returns them."""
    return json.loads(generate.FAMILIES.read_text())["families"]


def write_record(verdicts):
    """Writes families.json, one family a line, and the page that comes from it."""
    record = {
        "date": str(date.today()),
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
    }
    head = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in record.items()]
    lines = [f"  {json.dumps(name)}: {json.dumps(verdicts[name])}" for name in sorted(verdicts)]
    text = "\n".join(["{", *head, ' "families": {', ",\n".join(lines), " }", "}"])
    generate.FAMILIES.write_text(text + "\n")
    (ROOT / "docs/models.md").write_text(generate.models_page(), encoding="utf-8")


def main():
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    verdicts = {}
    for name in sorted(sys.argv[1:] or {*CAUSAL_LM, *TOWERS, *VARIANTS}):
        start = time.monotonic()
        verdicts[name] = try_family(name)
        reasons = [f"{part}: {reason}" for part, reason in verdicts[name].items()]
        print(
            f"{time.monotonic() - start:5.1f} s {name}: {'; '.join(reasons) or 'works'}", flush=True
        )
    if sys.argv[1:]:
        return
    before = read_record()
    write_record(verdicts)
    changed = []
    for name in verdicts.keys() & before.keys():
        if ("refused" in verdicts[name]) != ("refused" in before[name]):
            changed.append(name)
    if changed:
        sys.exit(f"other verdicts than before: {', '.join(sorted(changed))}")


if __name__ == "__main__":
    main()
