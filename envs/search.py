"""Questions that may be looked up, over several turns. Row: {"messages": [...], "answer": ["Paris", "City of Paris"]}.

The model writes <search>capital of France</search>, ends its turn and is given what a retrieval server finds; its answer
stands within <answer></answer>. The prompt should say so: examples/data.py has one. Results come in a message with the role
"tool"; where a chat template has no such role, rl2 sends them as the user's.

RL2_SEARCH_URL names the server, if that is not http://127.0.0.1:8000/retrieve. It is asked as that of Search-R1 is:
{"queries": ["..."], "topk": 3, "return_scores": true}, and answers {"result": [[{"document": {"contents": "..."}}, ...]]}.
"""

import json
import os
import re
import string
import urllib.request

SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
URL = os.environ.get("RL2_SEARCH_URL", "http://127.0.0.1:8000/retrieve")
TOP, MAX_CHARACTERS = 3, 1500  # documents, and characters of each


def look_up(query):
    body = json.dumps({"queries": [query], "topk": TOP, "return_scores": True}).encode()
    request = urllib.request.Request(URL, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=25) as response:
        found = json.load(response)["result"][0]
    texts = [one.get("document", one)["contents"].strip()[:MAX_CHARACTERS] for one in found]
    return "\n\n".join(f"[{i}] {text}" for i, text in enumerate(texts, 1)) or "nothing was found"


def interact(messages):
    """What the first search of the last turn finds; a turn that answers, or asks for nothing, ends the conversation."""
    reply = messages[-1]["content"]
    query = SEARCH.search(reply)
    if not query or ANSWER.search(reply):
        return []
    return [
        {
            "role": "tool",
            "content": look_up(query[1].strip()) if query[1].strip() else "the query is empty",
        }
    ]


def plain(text):
    """Lower case, without punctuation and articles."""
    text = "".join(letter for letter in str(text).lower() if letter not in string.punctuation)
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def reward_fn(messages, answer):
    """1.0 if the last <answer> of the last reply is one of the answers, else 0.0."""
    found = ANSWER.findall(messages[-1]["content"])
    answers = answer if isinstance(answer, list) else [answer]
    return float(bool(found) and plain(found[-1]) in map(plain, answers))
