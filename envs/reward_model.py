r"""The score of a reward model, which rl2.trainer.rm can train.

Row: {"messages": [...], "answer": anything}. The answer is not used.

    RL2_REWARD_MODEL=NAME    the reward model: a folder, or a name on Hugging Face
    RL2_REWARD_URL=...       a server that has it; without one it runs on the CPU, in every process
    RL2_REWARD_SERVER=vllm   what the server is: sglang, by default, or vllm

A small model can run in the processes of the trainer:

    RL2_REWARD_MODEL=runs/my_rm/model torchrun ... -m rl2.trainer.ppo \
        rollout.env_path=reward_model ...

A large model runs on a server that the trainer can reach, with RL2_REWARD_URL=http://HOST:30000:

    python -m sglang.launch_server --model-path runs/my_rm/model --is-embedding --port 30000
    vllm serve runs/my_rm/model --runner pooling --port 30000

The conversation is written by the reward model's own chat template, as in its training. A server
gets the tokens, so that it adds none; only the tokenizer is loaded here then. The scores are those
in process, but for the precision of the server (its option --dtype). vLLM is asked for the model's
numbers, not for their sigmoid.
"""

import functools
import json
import os
import threading
import urllib.error
import urllib.request

MODEL = os.environ.get("RL2_REWARD_MODEL")
URL = os.environ.get("RL2_REWARD_URL", "").rstrip("/").removesuffix("/classify")
SERVER = os.environ.get("RL2_REWARD_SERVER", "sglang")
TIMEOUT_SECONDS = 60
# rl2 calls from many threads. Scoring one conversation at a time is as fast, for they would share
# the same cores.
LOCK = threading.Lock()

if not MODEL:
    raise ValueError(
        "set the environment variable RL2_REWARD_MODEL to the reward model, also beside "
        "RL2_REWARD_URL: its chat template writes the conversation"
    )
if SERVER not in ("sglang", "vllm"):
    raise ValueError(f"RL2_REWARD_SERVER={SERVER}: choose sglang or vllm")


def reward_fn(messages, answer=None):
    """Returns the score of the whole conversation.

    If the server fails or is too slow, this trajectory is masked, as for every error of an env.
    """
    token_ids = tokenize(messages)
    return score_on_server(token_ids) if URL else score_in_process(token_ids)


def tokenize(messages):
    """Returns the token ids of the conversation.

    Transformers reads the score at the last token that is not padding, servers at the last one. So
    an end of turn that is the padding too is left out.
    """
    with LOCK:
        tokenizer = load_tokenizer(MODEL)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    while token_ids[-1] == tokenizer.pad_token_id:
        token_ids.pop()
    return token_ids


@functools.cache
def load_tokenizer(name):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def score_in_process(token_ids):
    import torch

    with LOCK, torch.inference_mode():
        model = load_model(MODEL)
        return model(input_ids=torch.tensor([token_ids])).logits[0, 0].item()


@functools.cache
def load_model(name):
    from transformers import AutoModelForSequenceClassification

    model, report = AutoModelForSequenceClassification.from_pretrained(
        name, dtype="float32", output_loading_info=True
    )
    if report["missing_keys"]:  # they would be random numbers
        raise ValueError(
            f"RL2_REWARD_MODEL={name} lacks {min(report['missing_keys'])}: give the folder of a "
            "reward model, which rl2.trainer.rm trains"
        )
    return model.eval()


def score_on_server(token_ids):
    content = {"input_ids": token_ids}
    if SERVER == "vllm":
        content = {"input": token_ids, "use_activation": False}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/classify", json.dumps(content).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            result = json.load(response)
    except (OSError, ValueError) as error:  # no server, a wrong path, no JSON
        reason = f"{error}"
        if isinstance(error, urllib.error.HTTPError):
            reason += f", {error.read(500).decode(errors='replace')}"
        raise RuntimeError(
            f"the reward model at RL2_REWARD_URL={URL} does not answer ({reason}): start a server, "
            "or leave the variable out, so that the model runs in this process"
        ) from None
    return read_score(result)


def read_score(result):
    """Returns the number in the response of a server. ValueError if it has another form."""
    try:
        [score] = result["data"][0]["probs"] if SERVER == "vllm" else result["embedding"]
        return float(score)
    except (LookupError, TypeError, ValueError):
        raise ValueError(
            f"RL2_REWARD_SERVER={SERVER}: expected one score from {URL}/classify, got "
            f"{str(result)[:200]}: see that the server is {SERVER} and has a reward model"
        ) from None
