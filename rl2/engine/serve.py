"""Serves an engine by HTTP: `python -m rl2.engine.serve model_name=FOLDER key=value ...`.

docs/engines.md has the requests. A trainer speaks to it with rollout.engine=server (server.py).
Every answer is JSON, that to a request which is refused too: {"error": why}.
"""

import asyncio
import hmac
import itertools
import json
import os
import pkgutil
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from omegaconf import MISSING
from transformers import AutoConfig, PreTrainedConfig

from rl2.attention.pages import MIN_ROWS
from rl2.config.engines import ENGINES, choose_engine
from rl2.config.help import explain
from rl2.config.key import NonNegativeInt, PositiveInt, key
from rl2.config.parse import parse
from rl2.engine.base import (
    SHARE_OF_OWN_GPU,
    Engine,
    EngineSettings,
    SamplingParams,
    default_max_running,
)
from rl2.engine.weight_shards import Hashes, read_shards
from rl2.model.folder import load_eos_token_ids, load_tokenizer
from rl2.parallel.device import compute_dtype, rounds_by_shape
from rl2.parallel.mesh import init_distributed
from rl2.run.signals import user_errors

TOKEN = "RL2_SERVER_TOKEN"  # the environment variable; never a key, which other users can see
MAX_BODY_BYTES = 2**24  # of a request
MAX_ANSWERS = 4096  # to a request
BACKLOG = 4096  # connections that wait while the engine takes a step
SECONDS_BETWEEN_ABORTS = 0.05
OWN_ENGINES = [name for name in ENGINES if name != "server"]


@dataclass
class ServeConfig:
    model_name: str = key(MISSING, "folder or hub name of a causal LM, such as RUN/model")
    engine: str = key("auto", "engine that generates", choices=("auto", *OWN_ENGINES))
    engine_args: dict[str, Any] = key({}, "other arguments of SGLang or vLLM: engine_args.NAME=...")
    host: str = key("127.0.0.1", "address to listen on; other machines may reach 0.0.0.0")
    port: NonNegativeInt = key(8000, "port to listen on; 0 takes a free one", below=2**16)
    dtype: str = key("auto", "dtype of the weights", choices=("auto", "float32", "bfloat16"))
    max_running: PositiveInt | None = key(
        None, "sequences that it decodes at a time; 64, or 256 with SGLang and vLLM on a GPU"
    )
    shared_dir: str | None = key(None, "folder from which weights may be loaded; by default none")


class Server:
    """An engine, and what answers requests to it, on the engine's loop."""

    def __init__(self, config: ServeConfig):
        """Starts the engine. ValueError and RuntimeError in words."""
        device = init_distributed()
        is_cpu = device.type == "cpu"
        self.kind, reason = choose_engine(config.engine)
        max_running = config.max_running or default_max_running(self.kind, device)
        can_be_exact = is_cpu and self.kind == "local" and max_running >= MIN_ROWS
        self.settings = EngineSettings(
            model_name=config.model_name,
            dtype=compute_dtype(config.dtype, device),
            device=device,
            max_running_requests=max_running,
            gpu_memory_utilization=SHARE_OF_OWN_GPU,
            deterministic=is_cpu,
            exact=can_be_exact and not rounds_by_shape(config.dtype),
            stop=["any"],  # for the engine to search for the stop texts of any request
            engine_args=config.engine_args,
        )
        self.model = describe_model(AutoConfig.from_pretrained(config.model_name))
        self.shared_dir = config.shared_dir
        self.tokenizer: Any = load_tokenizer("model_name", config.model_name)
        self.eos_token_ids = load_eos_token_ids(config.model_name)
        print(f"engine of {config.model_name}: {self.kind}, {reason}")
        self.engine: Engine = pkgutil.resolve_name(ENGINES[self.kind])(self.settings)
        # None after a load that failed. "" stands for the model that the server started with.
        self.weights: dict[str, object] | None = {"version": 0, "hash": ""}
        self.numbers = itertools.count()  # of answers without a seed
        self.num_running = 0  # requests
        self.changing = asyncio.Lock()  # while requests end and weights are loaded, none begins
        self.load: Callable[[], None]  # what `run` does when the loop stops
        self.loaded = asyncio.Event()
        self.problem: Exception | None = None  # of the last load

    def run(self, host: str, port: int) -> None:
        """Serves until a signal ends it. The engine loads weights while its loop does not run."""
        loop = self.engine.loop
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answer_errors])
        app.router.add_get("/health", self.health)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/reload_weights", self.reload_weights)
        app.router.add_post("/abort", self.abort)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        loop.run_until_complete(runner.setup())
        try:
            loop.run_until_complete(web.TCPSite(runner, host, port, backlog=BACKLOG).start())
            print(f"ready at http://{host}:{runner.addresses[0][1]}", flush=True)
            while True:
                loop.run_forever()
                self.problem = None
                try:
                    self.load()
                except Exception as error:  # the request for it gets it, whatever it is
                    self.problem = error
                self.loaded.set()
        finally:
            loop.run_until_complete(runner.cleanup())
            self.engine.close()

    async def health(self, request: web.Request) -> web.Response:
        """What the server has, and how it computes."""
        told = {
            "engine": self.kind,
            "model_name": self.settings.model_name,
            "model": self.model,
            "dtype": str(self.settings.dtype),
            "deterministic": self.settings.deterministic,
            "exact": self.settings.exact,
            "max_running": self.settings.max_running_requests,
            "weights": self.weights,
        }
        return web.json_response(told)

    async def generate(self, request: web.Request) -> web.Response:
        """Samples `n` answers to each prompt. Those of a prompt follow each other."""
        body = await read_body(request)
        params = read_params({"stop_token_ids": self.eos_token_ids, **body.get("params", {})})
        prompts, n = self._read_prompts(body), int(body.get("n", 1))
        if not 1 <= n * len(prompts) <= MAX_ANSWERS:
            raise ValueError(f"{len(prompts)} prompts, n={n}: expected 1 to {MAX_ANSWERS} answers")
        asked = [ids for ids in prompts for _ in range(n)]
        seeds = body.get("seeds") or [[0, next(self.numbers)] for _ in asked]
        if len(seeds) != len(asked):
            raise ValueError(f"{len(seeds)} seeds: expected one for each of {len(asked)} answers")
        async with self.changing:
            if self.weights is None or body.get("weights", self.weights) != self.weights:
                has = self.weights or "incomplete, since the last load failed"
                raise web.HTTPConflict(text=f"the weights of the server are {has}")
            self.num_running += 1
        try:
            async with asyncio.TaskGroup() as tasks:
                calls = [
                    tasks.create_task(self.engine.generate(ids, params, tuple(seed)))
                    for ids, seed in zip(asked, seeds, strict=True)
                ]
        except BaseExceptionGroup as errors:  # the first one has ended all tasks
            raise errors.exceptions[0] from None
        finally:
            self.num_running -= 1
        answers = []
        for call in calls:
            answer = vars(call.result())
            told = {name: answer[name] for name in ("tokens", "logps", "finish_reason", "version")}
            if "prompts" not in body:
                told["text"] = self.tokenizer.decode(told["tokens"], skip_special_tokens=True)
            answers.append(told)
        return web.json_response({"answers": answers})

    def _read_prompts(self, body: dict[str, Any]) -> list[list[int]]:
        """The token ids of `prompts`, `texts` or conversations in `messages`."""
        match body:
            case {"texts": [str(), *_] as texts}:
                return [self.tokenizer(text)["input_ids"] for text in texts]
            case {"messages": [[*_], *_] as conversations}:
                fill = partial(self.tokenizer.apply_chat_template, return_dict=False)
                return [fill(messages, add_generation_prompt=True) for messages in conversations]
            case {"prompts": [[*_], *_] as prompts}:
                if all(type(token) is int for ids in prompts for token in ids):
                    return prompts
        raise ValueError(
            "expected a list of `texts`, of conversations in `messages`, or of token ids in "
            "`prompts`"
        )

    async def reload_weights(self, request: web.Request) -> web.Response:
        """Loads a folder, after it has aborted what is in flight. Returns what is loaded."""
        body = await read_body(request)
        files = self._find_files(str(body.get("folder")))
        async with self.changing:
            while self.num_running:
                self.engine.abort()
                await asyncio.sleep(SECONDS_BETWEEN_ABORTS)
            self.load = partial(self._load, files, int(body["version"]), body.get("hash"))
            self.loaded.clear()
            self.engine.loop.stop()
            await self.loaded.wait()
            if self.problem is not None:
                raise self.problem
            return web.json_response(self.weights)

    def _find_files(self, name: str) -> list[Path]:
        """The safetensors of a folder, by its path from shared_dir. No other folder is read."""
        if self.shared_dir is None:
            raise web.HTTPForbidden(text="no weights are loaded without shared_dir=FOLDER")
        shared = Path(self.shared_dir).resolve()
        folder = (shared / name).resolve()
        files = sorted(folder.glob("*.safetensors")) if folder.is_relative_to(shared) else []
        if not all(path.resolve().is_relative_to(shared) for path in (folder, *files)):
            raise web.HTTPForbidden(text=f"folder={name} is outside of shared_dir={shared}")
        if not files:
            raise ValueError(f"folder={name} has no safetensors in shared_dir={shared}")
        return files

    def _load(self, files: list[Path], version: int, expected: str | None) -> None:
        self.weights = None
        hashes = Hashes(self.settings.dtype)
        self.engine.load_weights(hashes.add_each(read_shards(files)), version)
        if expected not in (None, hashes.of_all()):
            raise web.HTTPConflict(text="what was read has another hash than what was written")
        self.weights = {"version": version, "hash": hashes.of_all()}

    async def abort(self, request: web.Request) -> web.Response:
        """Ends all requests in flight, of all clients: they get the tokens so far."""
        self.engine.abort()
        return web.json_response({})


@web.middleware
async def answer_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Checks the token before a body is read, and puts errors into words."""
    token, given = os.environ.get(TOKEN), request.headers.get("Authorization", "")
    try:
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise web.HTTPUnauthorized(
                text="this server has a token: send the header Authorization: Bearer TOKEN, or "
                f"give a trainer the environment variable {TOKEN}"
            )
        return await handler(request)
    except web.HTTPException as error:
        status, reason = error.status, str(error.text)
    except (ValueError, TypeError, LookupError) as error:
        status, reason = 400, f"{type(error).__name__}: {error}"
    except Exception as error:  # of the engine
        status, reason = 500, str(error) or repr(error)
    return web.json_response({"error": reason}, status=status)


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request."""
    body = json.loads(await request.read())
    if not isinstance(body, dict):
        raise ValueError("expected a JSON object")
    return body


def read_params(given: dict[str, Any]) -> SamplingParams:
    """The sampling parameters. TypeError for what in the engine would end all that is in flight."""
    defaults = asdict(SamplingParams())
    if unknown := given.keys() - defaults.keys():
        raise ValueError(f"params.{min(unknown)}: unknown; there are {', '.join(defaults)}")
    for name, default in defaults.items():
        kind: Any = {float: float | int, tuple: list}.get(type(default), type(default))
        if name in given and not isinstance(given[name], kind):
            raise TypeError(f"params.{name}={given[name]!r}: expected a value as {default!r}")
    # Candidates are for a trainer in this process.
    return SamplingParams(**{**given, "with_candidates": False})


def describe_model(config: PreTrainedConfig) -> str:
    """What weights of one model have in common, in words, for comparison."""
    text = config.get_text_config()
    layers = f"{text.num_hidden_layers} layers of {text.hidden_size} channels"
    return f"{text.model_type}, {layers}, {text.vocab_size} tokens"


def main() -> None:
    """Starts the engine and serves it until Ctrl-C or SIGTERM."""
    if {"-h", "--help"} & set(sys.argv):
        print(f"python -m rl2.engine.serve model_name=... key=value\n{explain(ServeConfig)}")
        return
    config = parse(ServeConfig, sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # closes the engine
    try:
        with user_errors():
            Server(config).run(config.host, config.port)
    except KeyboardInterrupt:
        print("ended")


if __name__ == "__main__":
    main()
