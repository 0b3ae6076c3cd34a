"""A teacher that runs elsewhere: a server gives the log-probabilities of the sampled tokens.

Two protocols: the completions of OpenAI's API with `echo`, as vLLM has them, and SGLang's own
`/generate`. Both score a prompt of token ids at temperature 1, over the whole vocabulary.
"""

import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rl2.batch import Batch
from rl2.model.token_model import TokenScores
from rl2.parallel.mesh import all_reduce_sum_, broadcast_object
from rl2.progress import track

API_KEY = "TEACHER_API_KEY"  # the environment variable; never a key of the config, which is saved
CONCURRENCY = 32  # requests that the processes have open together
TIMEOUT_SECONDS = 600.0
TRIES = 5  # of a request that the server does not answer; the waits double from a second

# (token ids of a sequence, name of the model) -> the path and the body of a request.
Ask = Callable[[list[int], str], tuple[str, dict[str, Any]]]
# The reply -> (token id or None if it is not told, log-probability or None) of each token.
Read = Callable[[Any], list[tuple[int | None, float | None]]]


def _ask_openai(tokens: list[int], model: str) -> tuple[str, dict[str, Any]]:
    body = {
        "model": model,
        "prompt": tokens,
        "max_tokens": 1,  # some servers refuse 0
        "echo": True,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,  # vLLM's, others ignore it
    }
    return "/v1/completions", body


def _read_openai(reply: Any) -> list[tuple[int | None, float | None]]:
    logprobs = reply["choices"][0]["logprobs"]
    scores = []
    for token, logprob in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True):
        prefix, _, number = token.partition("token_id:")
        scores.append((int(number) if not prefix and number else None, logprob))
    return scores


def _ask_sglang(tokens: list[int], model: str) -> tuple[str, dict[str, Any]]:
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return "/generate", body


def _read_sglang(reply: Any) -> list[tuple[int | None, float | None]]:
    scored = reply["meta_info"]["input_token_logprobs"]  # [log-probability, token id, text] each
    return [(token, logprob) for logprob, token, *_ in scored]


PROTOCOLS: dict[str, tuple[Ask, Read]] = {
    "openai": (_ask_openai, _read_openai),
    "sglang": (_ask_sglang, _read_sglang),
}


@dataclass
class TeacherServer:
    """Scores tokens as a frozen worker does, by a server at `base_url`."""

    base_url: str  # without a path
    protocol: str  # of PROTOCOLS
    model: str  # by its name on the server
    device: torch.device  # of what the processes exchange

    def infer(self, batch: Batch, temperature: float = 1.0) -> TokenScores:
        """The log-probabilities of every trained token [B, T], in host memory, on all processes.

        The processes share the rows. RuntimeError if the server does not answer, or with something
        else than the scores of these tokens.
        """
        assert temperature == 1.0, "refused by the config"
        logps = torch.zeros(batch.mask.shape)
        world = dist.get_world_size()
        rows = range(dist.get_rank(), len(batch.mask), world)
        with ThreadPoolExecutor(max(1, CONCURRENCY // world)) as pool:
            calls = [pool.submit(self._score_row, batch, row) for row in rows]
            try:
                for row, call in track(list(zip(rows, calls, strict=True)), "sequences"):
                    scores = call.result()
                    logps[row, : len(scores)] = torch.tensor(scores)
            finally:
                pool.shutdown(cancel_futures=True)
        logps *= batch.mask > 0
        return TokenScores(logps=all_reduce_sum_(logps.to(self.device)).cpu())

    def _score_row(self, batch: Batch, row: int) -> list[float]:
        """The log-probabilities of a row's targets, up to the last trained one."""
        trained = batch.mask[row].nonzero()
        if not len(trained):
            return []
        return self.score(batch.tokens[row, : int(trained[-1]) + 2].tolist())

    def score(self, tokens: list[int]) -> list[float]:
        """The log-probability of each token after the first, given those before it."""
        ask, read = PROTOCOLS[self.protocol]
        path, body = ask(tokens, self.model)
        reply = request(self.base_url, path, body)
        try:
            scored = read(reply)[: len(tokens)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RuntimeError(
                f"teacher.base_url={self.base_url}: the answer of {path} has no log-probabilities "
                f"of the prompt as teacher.protocol={self.protocol} has them ({error!r}): "
                f"{json.dumps(reply)[:300]}"
            ) from error
        others = [token for token, _ in scored]
        wrong = [a for a, b in zip(tokens, others, strict=False) if b is not None and a != b]
        logps = [logprob for _, logprob in scored[1:]]
        unscored = [logprob for logprob in logps if not _is_logprob(logprob)]
        if wrong or unscored or len(scored) < len(tokens):
            raise RuntimeError(
                f"teacher.base_url={self.base_url}: {len(tokens)} tokens were sent, and "
                f"{len(scored)} scored, {len(wrong)} of them as other tokens, "
                f"{len(unscored)} without a finite log-probability: is it a model with the actor's "
                "tokenizer?"
            )
        return [float(logprob or 0.0) for logprob in logps]


def _is_logprob(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def request(base_url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that the server answers. Without a body the request is a GET.

    RuntimeError if it refuses the request, or does not answer after several tries.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(API_KEY):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    problem: object = None
    for number in range(TRIES):
        if number:
            time.sleep(2 ** (number - 1))
        try:
            call = urllib.request.Request(base_url + path, data, headers)
            with urllib.request.urlopen(call, timeout=TIMEOUT_SECONDS) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            problem = f"{error} {error.read(300).decode(errors='replace')}".strip()
            if error.code < 500 and error.code != 429:  # the same request would be refused again
                break
        except (OSError, http.client.HTTPException, ValueError) as error:  # no JSON: a ValueError
            problem = error
    raise RuntimeError(f"teacher.base_url={base_url}: {path} failed: {problem}")


def connect(base_url: str, protocol: str, model: str | None, device: torch.device) -> TeacherServer:
    """Returns the teacher, after the first process has scored two tokens with it.

    `model` is the name of the model on the server; None takes the first that it lists. RuntimeError
    if the server cannot be used.
    """
    base_url = base_url.rstrip("/").removesuffix("/v1")
    server = TeacherServer(base_url, protocol, model or "", device)
    problem = ""
    if dist.get_rank() == 0:
        try:
            if protocol == "openai" and model is None:
                server.model = request(base_url, "/v1/models")["data"][0]["id"]
            server.score([1, 2])
        except RuntimeError as error:
            problem = str(error)
        else:
            print(f"teacher: {server.model or 'a model'} at {base_url}")
    server.model, problem = broadcast_object((server.model, problem))
    if problem:
        raise RuntimeError(problem)
    return server
