"""Whole runs in forked processes, so that the imports happen once and a run starts at once.

The parent process, a script, must run no torch operation itself: threads, and the locks that they
have, do not survive a fork. So the store of all runs is in a process of its own.
"""

import atexit
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pandas  # noqa: F401  (pyarrow imports it with the first table, and the next one too)
import pyarrow.pandas_compat  # noqa: F401
import torch.distributed as dist
from transformers import conversion_mapping
from transformers.models.llama import modeling_llama  # noqa: F401  (of most models here)

import rl2.engine.local  # noqa: F401  (trainers import the engine that their config names)
from rl2.config.arguments import read_arguments
from rl2.config.parse import compose
from rl2.config.schema import PPOConfig
from rl2.parallel.mesh import GPU_FILE
from rl2.trainer import dpo, ppo, rm, sft

if not os.path.exists(GPU_FILE):  # bitsandbytes asks the GPU, which no fork could use afterwards
    with suppress(ImportError):  # some suites have no peft
        import peft  # noqa: F401  (adapters, and bitsandbytes with it)

MAINS = {"ppo": ppo.main, "sft": sft.main, "dpo": dpo.main, "rm": rm.main}
# transformers keeps its table of renamed weights, which takes a tenth of a short run to build.
conversion_mapping.get_checkpoint_conversion_mapping("llama")
# Hydra reads its grammar with the first config, which takes a quarter of a short run.
compose(PPOConfig, read_arguments(PPOConfig, ["trainer.disable_wandb=true"]))


class ForkedRuns:
    """Starts runs. Each has its own process group and a file with the output of its ranks."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.num_runs = 0
        self.port = host_store()
        gc.freeze()  # or each collection in a rank passes over all objects of the imports

    def start(
        self,
        world: int,
        trainer: str,
        arguments: Sequence[str],
        prepare: Callable[[int], None] = lambda rank: None,
    ) -> "ForkedRun":
        """Starts `world` ranks of a trainer; each calls prepare(rank) first. One rank is alone."""
        self.num_runs += 1
        output = self.folder / f"output_{self.num_runs}"
        output.touch()
        process_ids = []
        for rank in range(world):
            process_id = os.fork()
            if process_id == 0:
                self._run_rank(rank, world, trainer, arguments, prepare, output)
            process_ids.append(process_id)
        return ForkedRun(process_ids, output)

    def _run_rank(self, rank, world, trainer, arguments, prepare, output) -> None:
        status = 1
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
            for standard in (1, 2):
                os.dup2(descriptor, standard)
            sys.argv[1:] = arguments
            if world > 1:
                # To the ranks, every run is a restart of the one before.
                become_rank(rank, world, self.port, "forked", self.num_runs)
            prepare(rank)
            MAINS[trainer]()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(0.1)  # as rl2 does at exit, see parallel/mesh.py
            os._exit(status)


def become_rank(rank: int, world: int, port: int, run_id: str, restarts: int = 0) -> None:
    """Makes this process a rank, as torchrun does. The store of `host_store` listens at `port`."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_RUN_ID": run_id,
    }
    # torch's own would wait until the store has as many clients as ranks.
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.rendezvous = lambda url, timeout: iter([(client, rank, world)])


def host_store() -> int:
    """Starts a process that has a store until this one ends. Returns its port."""
    reader, writer = os.pipe()
    parent = os.getpid()
    process_id = os.fork()
    if process_id == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(0)
    atexit.register(os.kill, process_id, signal.SIGKILL)
    return int(os.read(reader, 10))


class ForkedRun:
    """The ranks of one run."""

    def __init__(self, process_ids: list[int], output: Path):
        self.process_ids = process_ids
        self.output_file = output
        self.statuses: dict[int, int] = {}  # by rank, of those that have ended; -9 is SIGKILL

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    @property
    def is_running(self) -> bool:
        for rank, process_id in enumerate(self.process_ids):
            if rank not in self.statuses:
                ended, status = os.waitpid(process_id, os.WNOHANG)
                if ended:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
        return len(self.statuses) < len(self.process_ids)

    def send(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Sends a signal to these ranks, or to all."""
        for rank, process_id in enumerate(self.process_ids):
            if rank not in self.statuses and (ranks is None or rank in ranks):
                os.kill(process_id, number)

    def wait(self, timeout: float = 60.0) -> list[int]:
        """The exit statuses. Kills the ranks and raises TimeoutError if they do not end."""
        self.wait_for(lambda: not self.is_running, timeout)
        return [self.statuses[rank] for rank in range(len(self.process_ids))]

    def wait_for(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise TimeoutError(self.output[-3000:])
            time.sleep(0.005)

    def end(self) -> None:
        """Kills what is left."""
        self.send(signal.SIGKILL)
        self.wait_for(lambda: not self.is_running)
