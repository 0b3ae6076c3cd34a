"""A teacher that runs elsewhere: a server that scores the sampled tokens.

It has the completions of OpenAI's API with `echo`, as vLLM, and scores a prompt of token ids at
temperature 1, over the whole vocabulary.
"""

import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rl2.batch import Batch
from rl2.model.token_model import TokenScores
from rl2.parallel.mesh import all_reduce_sum_, broadcast_object

API_KEY = "TEACHER_API_KEY"  # the environment variable; never a key of the config, which is saved
CONCURRENCY = 32  # requests that the processes have open together
TIMEOUT_SECONDS = 600.0
TRIES = 5  # of a request that the server does not answer; the waits double from a second


@dataclass
class TeacherServer:
    """Scores tokens as a frozen worker does, by a server at `base_url`."""

    base_url: str  # without a path
    model: str  # by its name on the server
    device: torch.device  # of what the processes exchange

    def score(self, batch: Batch, temperature: float = 1.0) -> TokenScores:
        """The log-probabilities of every trained token [B, T], in host memory, on all processes.

        The processes share the rows. RuntimeError if the server does not answer, or with something
        else than the scores of these tokens.
        """
        assert temperature == 1.0, "refused by the config"
        logps = torch.zeros(batch.mask.shape)
        rows = range(dist.get_rank(), len(batch.mask), dist.get_world_size())
        with ThreadPoolExecutor(max(1, CONCURRENCY // dist.get_world_size())) as pool:
            for row, scores in zip(
                rows, pool.map(lambda row: self._score_row(batch, row), rows), strict=True
            ):
                logps[row, : len(scores)] = torch.tensor(scores)
        logps *= batch.mask > 0
        return TokenScores(logps=all_reduce_sum_(logps.to(self.device)).cpu())

    def _score_row(self, batch: Batch, row: int) -> list[float]:
        """The log-probabilities of a row's targets, up to the last trained one."""
        trained = batch.mask[row].nonzero()
        if not len(trained):
            return []
        return self.score_tokens(batch.tokens[row, : int(trained[-1]) + 2].tolist())

    def score_tokens(self, tokens: list[int]) -> list[float]:
        """The log-probability of each token after the first, given those before it."""
        scored = self._ask(tokens)[: len(tokens)]
        wrong = [a for a, (b, _) in zip(tokens, scored, strict=False) if b not in (None, a)]
        logps = [logprob for _, logprob in scored[1:]]
        unscored = [p for p in logps if not isinstance(p, int | float) or not math.isfinite(p)]
        if wrong or unscored or len(scored) < len(tokens):
            raise RuntimeError(
                f"teacher.base_url={self.base_url}: {len(tokens)} tokens were sent, and "
                f"{len(scored)} scored, {len(wrong)} of them as other tokens, "
                f"{len(unscored)} without a finite log-probability: is it a model with the actor's "
                "tokenizer?"
            )
        return [float(logprob or 0.0) for logprob in logps]

    def _ask(self, tokens: list[int]) -> list[tuple[int | None, float | None]]:
        """(token id, or None if it is not told; log-probability) of each token."""
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": 1,  # some servers refuse 0
            "echo": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,  # vLLM's, others ignore it
        }
        reply = request(self.base_url, "/v1/completions", body)
        try:
            logprobs = reply["choices"][0]["logprobs"]
            ids = [name.partition("token_id:")[2] for name in logprobs["tokens"]]
            known = [int(number) if number else None for number in ids]
            return list(zip(known, logprobs["token_logprobs"], strict=True))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RuntimeError(
                f"teacher.base_url={self.base_url}: the answer has no log-probabilities of the "
                f"prompt, as completions with echo ({error!r}): {json.dumps(reply)[:300]}"
            ) from error


def request(base_url: str, path: str, body: dict[str, object] | None = None) -> Any:
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


def connect(base_url: str, model: str | None, device: torch.device) -> TeacherServer:
    """Returns the teacher, after the first process has scored two tokens with it.

    `model` is the name of the model on the server; None takes the first that it lists. RuntimeError
    if the server cannot be used.
    """
    base_url = base_url.rstrip("/").removesuffix("/v1")
    server = TeacherServer(base_url, model or "", device)
    problem = ""
    if dist.get_rank() == 0:
        try:
            if model is None:
                server.model = request(base_url, "/v1/models")["data"][0]["id"]
            server.score_tokens([1, 2])
        except RuntimeError as error:
            problem = str(error)
        else:
            print(f"teacher: {server.model} at {base_url}")
    server.model, problem = broadcast_object((server.model, problem))
    if problem:
        raise RuntimeError(problem)
    return server
