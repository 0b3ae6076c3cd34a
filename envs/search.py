"""Questions that the model may look up with a search server, for rollout.max_turns > 1.

Row: {"messages": [...], "answer": ["Paris", "City of Paris"]}. The answer is one right answer, or a
list of all of them.

The model writes <search>capital of France</search> and ends its turn; with
'rollout.train_sampling_params.stop=["</search>"]' the turn ends there by itself. The next message
gives it the documents that the server finds. The prompt should explain this, and that the answer
goes into <answer></answer>: examples/data.py has such a prompt.

Results come in a message with the role "tool". If a chat template does not have that role, rl2
sends the message with the role "user".

RL2_SEARCH_URL is the server's address, by default http://127.0.0.1:8000/retrieve. Requests and
responses are those of Search-R1's retrieval server:

    {"queries": ["..."], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"contents": "..."}}, ...]]}
"""

import json
import os
import re
import string
import urllib.request

URL = os.environ.get("RL2_SEARCH_URL", "http://127.0.0.1:8000/retrieve")
TIMEOUT_SECONDS = 25
NUM_DOCUMENTS = 3
MAX_CHARACTERS = 1500  # of each document
ARTICLES = ("a", "an", "the")


def interact(messages):
    """The documents for the first search of the last turn.

    A turn that has an answer, or no search, ends the conversation.
    """
    reply = messages[-1]["content"]
    searches = find_all("search", reply)
    if not searches or find_all("answer", reply):
        return []
    query = searches[0].strip()
    content = look_up(query) if query else "the query is empty"
    return [{"role": "tool", "content": content}]


def reward_fn(messages, answer):
    """1.0 if the last <answer></answer> of the last reply is a right answer, else 0.0.

    Case, punctuation and articles do not matter.
    """
    answers = find_all("answer", messages[-1]["content"])
    if not answers:
        return 0.0
    right_answers = answer if isinstance(answer, list) else [answer]
    return float(normalise(answers[-1]) in map(normalise, right_answers))


def find_all(tag, text):
    """The texts between <tag> and the next </tag>."""
    # The time of the pattern is linear only in a text that ends with the closing tag.
    head, closing_tag, _ = text.rpartition(f"</{tag}>")
    return re.findall(f"<{tag}>(.*?)</{tag}>", head + closing_tag, re.DOTALL)


def look_up(query):
    """The text of the documents that the server finds, each after its number: [1] ..., [2] ..."""
    question = {"queries": [query], "topk": NUM_DOCUMENTS, "return_scores": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(URL, json.dumps(question).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        results = json.load(response)["result"][0]
    texts = []
    for number, result in enumerate(results, start=1):
        document = result.get("document", result)
        texts.append(f"[{number}] {document['contents'].strip()[:MAX_CHARACTERS]}")
    return "\n\n".join(texts) or "nothing was found"


def normalise(text):
    """The words in lower case, without punctuation and articles."""
    lower = str(text).lower()
    text = "".join(character for character in lower if character not in string.punctuation)
    return " ".join(word for word in text.split() if word not in ARTICLES)
