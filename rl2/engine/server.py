"""Engines on servers, `rl2.engine.serve`, that the ranks share. Weights travel through a folder.

A request names the weights that it is for, by version and hash: a server with other ones refuses
it. An answer of a deterministic server depends on the request alone, so it is the same from another
server if the first one dies.
"""

import asyncio
import os
import secrets
import shutil
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from safetensors import SafetensorError
from transformers import AutoConfig

from rl2.engine.base import Engine, EngineSettings, Generation, NamedTensors, SamplingParams, Seed
from rl2.engine.serve import TOKEN, describe_model
from rl2.engine.weight_shards import Hashes, write_shards
from rl2.error_report import describe_failed_write
from rl2.model.classes import language_model_class
from rl2.model.weight_files import read_weights
from rl2.parallel.fsdp import persistent_buffers
from rl2.parallel.mesh import broadcast_object
from rl2.progress import expecting, mark

SECONDS_TO_CONNECT = 30.0  # a server takes no connection while it loads, or in a step
SECONDS_TO_ANSWER = 120.0  # whether it is there; the model's answers may take any time
SECONDS_TO_LOAD = 1800.0
SECONDS_OF_SILENCE = 60  # after which the system asks a machine whether it is still there
# Another client has ended a request of ours. If it was a rank, this one aborts within that time.
SECONDS_TO_AGREE = 0.5


@dataclass(eq=False)
class Remote:
    """A server as this rank knows it."""

    url: str
    num_requests: int = 0  # of this rank, in flight
    death: str = ""  # why it is not asked before the next load of weights; "" while it lives


class ServerEngine(Engine):
    """The servers at `settings.server_urls`. Each rank sends its requests to all of them.

    RuntimeError if one of them does not answer at the start, or does not fit the settings. Later
    they may die and come back, but for one.
    """

    def __init__(self, settings: EngineSettings):
        self.index = settings.rank
        self.count = settings.world_size
        self.max_running_requests = settings.max_running_requests
        self.dtype = settings.dtype
        self.shared_dir = Path(settings.shared_dir)
        self.loop = asyncio.new_event_loop()
        self.version: int | None = None
        self.weights: dict[str, object] = {}  # version and hash of what the servers have
        self.hashes = Hashes(self.dtype)  # of these weights, on the first rank
        self.num_aborts = 0
        self.tasks: set[asyncio.Task[Any]] = set()  # which abort
        self.room = asyncio.Semaphore(self.max_running_requests)
        urls = [url.rstrip("/") for url in settings.server_urls]
        first = settings.rank % len(urls)  # among equals, each rank prefers another one
        self.servers = [Remote(url) for url in urls[first:] + urls[:first]]
        config = AutoConfig.from_pretrained(settings.model_name)
        self.loop.run_until_complete(self._check_servers(settings, describe_model(config)))
        # What they have may be of another run: they begin with the model of this one.
        start: NamedTensors = ()
        if settings.rank == 0:
            model_class = language_model_class(config)
            model, _ = read_weights(model_class, settings.model_name, config, self.dtype)
            start = [*model.named_parameters(), *persistent_buffers(model)]
        self.load_weights(start, 0)

    async def _check_servers(self, settings: EngineSettings, model: str) -> None:
        wanted: dict[str, object] = {"model": model, "dtype": str(settings.dtype)}
        wanted |= {name: True for name in ("deterministic", "exact") if getattr(settings, name)}
        for server in self.servers:
            health = await self._ask(server, "/health", None, SECONDS_TO_ANSWER)
            self._choose_server([server])  # raises if it is dead
            for name, value in wanted.items():
                if health[name] != value:
                    raise RuntimeError(
                        f"rollout.server_urls: {server.url} has {name}={health[name]}, and this "
                        f"run needs {value}. Start it with this run's model_name and dtype; where "
                        "it cannot be deterministic or exact, set trainer.deterministic=false and "
                        "leave rollout.exact out"
                    )

    def _choose_server(self, servers: Sequence[Remote]) -> Remote:
        """The one with the fewest requests of this rank. RuntimeError if none lives."""
        living = [server for server in servers if not server.death]
        if not living:
            deaths = "; ".join(server.death for server in servers)
            raise RuntimeError(f"rollout.server_urls: no server is left. {deaths}")
        return min(living, key=lambda server: server.num_requests)

    async def _ask(
        self, server: Remote, path: str, body: object, seconds: float | None = None
    ) -> Any:
        """The JSON that a server answers; None if it dies, or has other weights.

        Without a body the request is a GET. ValueError for one that can never be answered.
        """
        token = os.environ.get(TOKEN)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=SECONDS_TO_CONNECT)
        connector = aiohttp.TCPConnector(socket_factory=open_socket)
        method = "GET" if body is None else "POST"
        server.num_requests += 1
        try:  # with a connection of its own, since the server may close one that is kept
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(method, server.url + path, json=body, headers=headers) as reply,
            ):
                status, value = reply.status, await reply.json()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            status, value = 500, {"error": str(error) or repr(error)}
        finally:
            server.num_requests -= 1
        if status == 200:
            return value
        reason = f"{server.url}{path}: {value.get('error', value)}"
        if status == 400:
            raise ValueError(reason)
        if status < 500 and status != 409:
            raise RuntimeError(reason)
        if not server.death:
            print(f"rank {self.index}: a server is left out until the next step: {reason}")
        server.death = reason
        return None

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, seed: Seed
    ) -> Generation:
        """Samples an answer, see Engine.generate. RuntimeError if no server lives."""
        assert self.version is not None, "the weights are incomplete: the last load failed"
        body = {
            "prompts": [list(prompt)],
            "params": asdict(params),
            "seeds": [seed],
            "weights": self.weights,
        }
        num_aborts = self.num_aborts
        async with self.room:
            while num_aborts == self.num_aborts:
                reply = await self._ask(self._choose_server(self.servers), "/generate", body)
                if reply is None:
                    continue
                mark()
                [answer] = reply["answers"]
                is_aborted = answer["finish_reason"] == "abort"
                if is_aborted and num_aborts == self.num_aborts:
                    await asyncio.sleep(SECONDS_TO_AGREE)
                if not is_aborted or num_aborts != self.num_aborts:
                    return Generation(**answer | {"version": self.version})
        return Generation([], [], "abort", self.version)

    def abort(self) -> None:
        self.num_aborts += 1
        for server in self.servers:
            if server.num_requests:
                ending = self._ask(server, "/abort", {}, SECONDS_TO_ANSWER)
                self.tasks.add(self.loop.create_task(ending))
        self.tasks = {task for task in self.tasks if not task.done()}

    def sleep(self) -> None:
        """Nothing: servers have memory of their own."""

    def wake(self) -> None:
        """Nothing."""

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Has all servers load the tensors, dead ones too, see Engine.load_weights.

        The first rank writes them into a new folder, and removes it at the end. RuntimeError on all
        ranks if it cannot, or if a server refuses them.
        """
        self.version = None
        self.hashes = Hashes(self.dtype)
        problem = ""
        tensors = iter(named_tensors)
        if self.index == 0:
            folder = self.shared_dir / f"version_{version}_{secrets.token_hex(4)}"
            try:
                write_shards(self.hashes.add_each(tensors), folder)
                self.weights = {"version": version, "hash": self.hashes.of_all()}
                with expecting(SECONDS_TO_LOAD):
                    problem = self.loop.run_until_complete(self._load_all(folder.name))
            except (OSError, SafetensorError) as error:
                problem = f"{describe_failed_write(folder)}: {error}"
            shutil.rmtree(folder, ignore_errors=True)
        for _ in tensors:  # also after an error: making them communicates
            mark()
        deaths = {server.url: server.death for server in self.servers}
        problem, self.weights, deaths = broadcast_object((problem, self.weights, deaths))
        if problem:
            raise RuntimeError(problem)
        for server in self.servers:
            server.death = deaths[server.url]
        self.version = version

    async def _load_all(self, folder: str) -> str:
        """Why the servers cannot load the folder; "" if one of them has, and none refuses it."""

        async def load(server: Remote) -> None:
            body = {"folder": folder, **self.weights}
            if await self._ask(server, "/reload_weights", body, SECONDS_TO_LOAD) is not None:
                server.death = ""

        try:
            await asyncio.gather(*map(load, self.servers))
            self._choose_server(self.servers)
        except (ValueError, RuntimeError) as error:
            return str(error)
        return ""

    def verify_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Compares by hash with what the servers have loaded, see Engine.verify_weights."""
        hashes = Hashes(self.dtype)
        for _ in hashes.add_each(named_tensors) if self.index == 0 else named_tensors:
            mark()
        different = sorted({name for name, _ in hashes.items() ^ self.hashes.items()})
        different = broadcast_object(different)
        if different:
            raise RuntimeError(
                f"{len(different)} weights of the servers are not the trainer's: {different[:5]}"
            )
        self.version = version

    def close(self) -> None:
        """Cancels what is in flight. The servers stay."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        if not self.loop.is_running() and not self.loop.is_closed():
            self.loop.run_until_complete(asyncio.sleep(0))  # in which they end
            self.loop.close()


def open_socket(address: Any) -> socket.socket:
    """Returns a socket that notices when the other machine is gone."""
    opened = socket.socket(*address[:3])
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # on Linux; otherwise it asks after two hours
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SECONDS_OF_SILENCE)
    return opened
