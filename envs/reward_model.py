"""The score of a reward model that a server holds. Row: {"messages": [...], "answer": anything}.

Train one with rl2.trainer.rm and serve its folder where the trainer can reach it, for instance with SGLang:
    python -m sglang.launch_server --model-path runs/my_rm/model --is-embedding --port 30000
RL2_REWARD_URL names its address, if that is not http://127.0.0.1:30000/classify. What is sent is {"text": "..."}; what
comes back is {"embedding": [score]}, or a list with that in it.

`render` must write what the model was trained on: the chat template of its folder. It is plain ChatML here. Some
templates begin a conversation that has no system message with one of their own (SmolLM2's, Qwen2.5's): add it then.
"""

import json
import os
import urllib.request

URL = os.environ.get("RL2_REWARD_URL", "http://127.0.0.1:30000/classify")


def render(messages):
    return "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)


def reward_fn(messages, answer=None):
    """The score of the conversation. A server that fails or is slow costs this trajectory, as any error of an env does."""
    body = json.dumps({"text": render(messages)}).encode()
    request = urllib.request.Request(URL, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        found = json.load(response)
    found = found[0] if isinstance(found, list) else found
    return float(found["embedding"][0])
