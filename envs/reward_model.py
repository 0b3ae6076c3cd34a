"""The score of a reward model. Row: {"messages": [...], "answer": anything}. Train one with rl2.trainer.rm.

A small one runs here, on the CPU, in every process of the trainer: RL2_REWARD_MODEL names its folder.
    RL2_REWARD_MODEL=runs/my_rm/model torchrun ... -m rl2.trainer.ppo rollout.env_path=envs/reward_model.py ...

A large one is served where the trainer can reach it, for instance with SGLang:
    python -m sglang.launch_server --model-path runs/my_rm/model --is-embedding --port 30000
RL2_REWARD_URL names its address, if that is not http://127.0.0.1:30000/classify. What is sent is {"text": "..."}; what
comes back is {"embedding": [score]}, or a list with that in it.

What is scored must be written as the model was trained on it: by the chat template of its folder. Here that is done; for a
server, `render` must do it, and is plain ChatML. Some templates begin a conversation that has no system message with one
of their own (SmolLM2's, Qwen2.5's): add it then.
"""

import functools
import json
import os
import threading
import urllib.request

FOLDER = os.environ.get("RL2_REWARD_MODEL")
URL = os.environ.get("RL2_REWARD_URL", "http://127.0.0.1:30000/classify")
LOCK = threading.Lock()  # calls come from many threads; they would only share the same cores


def reward_fn(messages, answer=None):
    """The score of the conversation. A server that fails or is slow costs this trajectory, as any error of an env does."""
    return score_here(messages) if FOLDER else score_there(messages)


def score_here(messages):
    import torch

    with LOCK, torch.inference_mode():
        tokenizer, model = load(FOLDER)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return model(**inputs).logits[0, 0].item()


@functools.cache
def load(folder):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32")
    return AutoTokenizer.from_pretrained(folder), model.eval()


def score_there(messages):
    body = json.dumps({"text": render(messages)}).encode()
    request = urllib.request.Request(URL, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        found = json.load(response)
    found = found[0] if isinstance(found, list) else found
    return float(found["embedding"][0])


def render(messages):
    return "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages
    )
