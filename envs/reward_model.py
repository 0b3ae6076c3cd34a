r"""The score of a reward model, which rl2.trainer.rm can train.

Row: {"messages": [...], "answer": anything}. The answer is not used.

A small model can run in every process of the trainer, on the CPU. RL2_REWARD_MODEL is its folder:

    RL2_REWARD_MODEL=runs/my_rm/model torchrun ... -m rl2.trainer.ppo \
        rollout.env_path=envs/reward_model.py ...

A large model runs on a server that the trainer can reach, for instance with SGLang:

    python -m sglang.launch_server --model-path runs/my_rm/model --is-embedding --port 30000

RL2_REWARD_URL is the server's address, by default http://127.0.0.1:30000/classify. A request is
{"text": "..."}; its response is {"embedding": [score]}, or a list whose first item is that.

The conversation must be written as in the training of the reward model, by its chat template. In
process this happens by itself. For a server, `render` must do it: it writes plain ChatML. Some
templates begin a conversation that has no system message with a default one (SmolLM2, Qwen2.5). In
that case add it to `render`.
"""

import functools
import json
import os
import threading
import urllib.request

MODEL_FOLDER = os.environ.get("RL2_REWARD_MODEL")
URL = os.environ.get("RL2_REWARD_URL", "http://127.0.0.1:30000/classify")
TIMEOUT_SECONDS = 60
# rl2 calls from many threads. Scoring one conversation at a time is as fast, for they would share
# the same cores.
LOCK = threading.Lock()


def reward_fn(messages, answer=None):
    """Returns the score of the whole conversation.

    If the server fails or is too slow, this trajectory is masked, as for every error of an env.
    """
    if MODEL_FOLDER:
        return score_in_process(messages)
    return score_on_server(messages)


def score_in_process(messages):
    import torch

    with LOCK, torch.inference_mode():
        tokenizer, model = load_model(MODEL_FOLDER)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return model(**inputs).logits[0, 0].item()


@functools.cache
def load_model(folder):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype="float32", output_loading_info=True
    )
    if report["missing_keys"]:  # they would be random numbers
        raise ValueError(
            f"RL2_REWARD_MODEL={folder} lacks {min(report['missing_keys'])}: give the folder of a "
            "reward model, which rl2.trainer.rm trains"
        )
    return AutoTokenizer.from_pretrained(folder), model.eval()


def score_on_server(messages):
    body = json.dumps({"text": render(messages)}).encode()
    request = urllib.request.Request(URL, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            result = json.load(response)
    except (OSError, ValueError) as error:  # no server, a wrong path, no JSON
        raise RuntimeError(
            f"the reward model at RL2_REWARD_URL={URL} does not answer ({error}): start a "
            "server, or set RL2_REWARD_MODEL to the folder of a small model, which then runs in "
            "this process"
        ) from None
    if isinstance(result, list):
        result = result[0]
    return float(result["embedding"][0])


def render(messages):
    text = ""
    for message in messages:
        text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return text
