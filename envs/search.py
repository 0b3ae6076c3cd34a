r"""Questions that the model may look up with a search server, for rollout.max_turns > 1.

Row: {"messages": [...], "answer": ["Paris", "City of Paris"]}. The answer is one right answer, or a
list of all of them.

The model writes <search>capital of France</search> and ends its turn; with
'rollout.train_sampling_params.stop=["</search>"]' the turn ends there by itself. The next message
gives it the documents that the server finds. The prompt should explain this, and that the answer
goes into <answer></answer>: examples/data.py has such a prompt.

Results come in a message with the role "tool". If a chat template does not have that role, rl2
sends the message with the role "user".

This file is also a server for a corpus of your own, which ranks by BM25. CORPUS.jsonl has a
{"contents": "..."} on each line:

    python envs/search.py serve examples/rows/search_corpus.jsonl --port 8000

Beside it, one step on a CPU, with a small model in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=search data.path=examples/rows/search.jsonl \
        actor.model_name=MODEL trainer.max_steps=1 data.prompts_per_rollout=3 \
        data.responses_per_prompt=2 rollout.train_sampling_params.max_new_tokens=32 \
        rollout.max_turns=3 'rollout.train_sampling_params.stop=["</search>"]'

RL2_SEARCH_URL is the address of another server. Requests and responses are those of Search-R1's
retrieval server:

    {"queries": ["..."], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"contents": "..."}, "score": 1.5}, ...]]}
"""

import argparse
import heapq
import json
import math
import os
import re
import string
import urllib.request
from array import array
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rl2.rewards.text import last_tagged, same_text

URL = os.environ.get("RL2_SEARCH_URL", "http://127.0.0.1:8000/retrieve")
TIMEOUT_SECONDS = 25
NUM_DOCUMENTS = 3
MAX_CHARACTERS = 1500  # of each document
MAX_QUERY_CHARACTERS = 1000
ARTICLES = ("a", "an", "the")


def interact(messages):
    """Returns the documents for the first search of the last turn.

    A turn that has an answer, or no search, ends the conversation.
    """
    reply = messages[-1]["content"]
    first, closing_tag, _ = reply.partition("</search>")
    query = last_tagged(first + closing_tag, "search")
    if query is None or last_tagged(reply) is not None:
        return []
    content = look_up(query[:MAX_QUERY_CHARACTERS]) if query else "the query is empty"
    return [{"role": "tool", "content": content}]


def reward_fn(messages, answer):
    """1.0 if the last <answer></answer> of the last reply is a right answer, else 0.0.

    Case, punctuation and articles do not matter.
    """
    field = last_tagged(messages[-1]["content"])
    right_answers = answer if isinstance(answer, list) else [answer]
    return float(any(is_same(field, str(right)) for right in right_answers))


def is_same(field, answer):
    """Whether two texts have the same words; without words, whether they are the same text."""
    words = normalise(field or "")
    return words == normalise(answer) if words else same_text(field, answer)


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
    """Returns the words in lower case, without punctuation and articles."""
    lower = text.lower()
    text = "".join(character for character in lower if character not in string.punctuation)
    return " ".join(word for word in text.split() if word not in ARTICLES)


# The server.

SATURATION, LENGTH_WEIGHT = 1.2, 0.75  # k1 and b of BM25
WORD = re.compile(r"\w+")
MAX_REQUEST_BYTES = 2**20
MAX_QUERIES, MAX_DOCUMENTS = 100, 100  # of a request


class Index:
    """Texts that are found by their words: BM25 as in Lucene, where no word counts negatively."""

    def __init__(self, texts):
        self.texts = texts
        counts = [Counter(words_of(text)) for text in texts]
        lengths = [sum(count.values()) for count in counts]
        mean_length = sum(lengths) / max(1, len(lengths))
        # Word -> the numbers of the texts that have it, and its weight in each of them.
        self.places: dict[str, tuple[array, array]] = {}
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            saturation = SATURATION * (
                1 - LENGTH_WEIGHT + LENGTH_WEIGHT * length / max(1, mean_length)
            )
            for word, frequency in count.items():
                numbers, weights = self.places.setdefault(word, (array("L"), array("f")))
                numbers.append(number)
                weights.append(frequency * (SATURATION + 1) / (frequency + saturation))

    def search(self, query, limit):
        """Returns the best (text, score), best first.

        Of equal ones the earlier text comes first.
        """
        scores = Counter()
        for word in dict.fromkeys(words_of(query)):
            numbers, weights = self.places.get(word, ((), ()))
            rest = len(self.texts) - len(numbers)
            rarity = math.log(1 + (rest + 0.5) / (len(numbers) + 0.5))
            for number, weight in zip(numbers, weights, strict=True):
                scores[number] += rarity * weight
        best = heapq.nsmallest(limit, scores.items(), key=lambda item: (-item[1], item[0]))
        return [(self.texts[number], score) for number, score in best]


def words_of(text):
    return WORD.findall(text.casefold())


def read_corpus(path):
    """Returns the texts of a corpus. ValueError names the line that has none."""
    texts = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                texts.append(json.loads(line)["contents"])
                words_of(texts[-1])
            except (ValueError, TypeError, KeyError) as error:
                message = f'{path}:{number}: expected {{"contents": "..."}}, got {line[:80]!r}'
                raise ValueError(message) from error
    return texts


def make_server(index, host, port):
    """Returns a server of the index. Port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT_SECONDS  # of reading a request

        def do_POST(self):
            try:
                length = int(self.headers["Content-Length"])
                if not 0 <= length <= MAX_REQUEST_BYTES:
                    raise ValueError(f"the request has {length} bytes, at most {MAX_REQUEST_BYTES}")
                result = answer_request(index, json.loads(self.rfile.read(length)))
                status, content = 200, {"result": result}
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                status, content = 400, {"error": f"{type(error).__name__}: {error}"}
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    return ThreadingHTTPServer((host, port), Handler)


def answer_request(index, request):
    """Returns the documents of each query of a request."""
    limit = min(int(request.get("topk", NUM_DOCUMENTS)), MAX_DOCUMENTS)
    return [
        [
            {"document": {"contents": text}, "score": score}
            for text, score in index.search(query[:MAX_QUERY_CHARACTERS], limit)
        ]
        for query in request["queries"][:MAX_QUERIES]
    ]


def main():
    parser = argparse.ArgumentParser(description="Serves the search of a corpus.")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("corpus", help='JSON lines of {"contents": "..."}')
    parser.add_argument("--host", default="127.0.0.1", help="others than this can reach it: no key")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    index = Index(read_corpus(arguments.corpus))
    with make_server(index, arguments.host, arguments.port) as server:
        address = f"http://{arguments.host}:{server.server_port}/retrieve"
        print(f"{len(index.texts)} texts at RL2_SEARCH_URL={address}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
