"""Runs steps of a recorded run again. `rl2 replay` starts one process or several of it:

    [torchrun ...] -m rl2.tools.rerun JSON

JSON has the fields of `replay.Rerun`. The trainer runs as it did and leaves out what changes no
weights: evaluations, checkpoints, exports, services.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl2.config.conditions import count_samplers
from rl2.config.parse import parse
from rl2.config.schema import DPOConfig, PPOConfig, RMConfig, SFTConfig, worker_names
from rl2.data.rows import hash_sources
from rl2.parallel.worlds import is_sampler
from rl2.run.changes import DATA
from rl2.run.signals import guard
from rl2.tools.replay import Rerun
from rl2.trainer import dpo, ppo, rm, sft
from rl2.trainer.ppo_run import PPORun, SamplerRun, set_up
from rl2.trainer.recorder import Replay

# The name of the config's class -> (the class, what makes the run, what trains it).
TRAINERS: dict[str, tuple[type, Callable[..., Any], Callable[[Any], None]]] = {
    "PPOConfig": (PPOConfig, PPORun, ppo.train),
    "SFTConfig": (SFTConfig, sft.make_run, sft.train),
    "DPOConfig": (DPOConfig, dpo.make_run, dpo.train),
    "RMConfig": (RMConfig, rm.make_run, rm.train),
}


def read_config(rerun: Rerun, kind: type) -> Any:
    """Returns the run's config with other places; only records are written."""
    config: Any = parse(kind, ["--config-dir", rerun.config, "--config-name", "config.yaml"])
    config.trainer.save_dir = rerun.out
    config.trainer.resume = rerun.checkpoint or "auto"
    config.trainer.save_freq = None
    config.trainer.loggers = []
    for name in worker_names(config):
        section = getattr(config, name)
        section.save_dir = section.save_freq = None
    return config


def check_data(config: Any, recorded: Path) -> None:
    """ValueError if the training rows are not those of the recorded run."""
    before = json.loads((recorded / "run.json").read_text())["identity"]["contents"].get(DATA)
    now = hash_sources(config.data.train_paths)
    if before and now and before != now:
        raise ValueError(
            f"{DATA}={config.data.path} has another content than when {recorded} was recorded "
            f"(SHA-256 {before[:16]} then, {now[:16]} now): restore the original rows"
        )


def sample(config: PPOConfig, takes_saved: bool) -> None:
    """What a process of rollout.num_processes does. There is nothing to sample with saved tokens,
    but the trainers are as many as they were.
    """
    if takes_saved:
        set_up(config, num_samplers=count_samplers(config))
        dist.destroy_process_group()
    else:
        SamplerRun(config).run()


def main() -> None:
    """Runs the steps. All processes of the job must call."""
    rerun = Rerun(**json.loads(sys.argv[1]))
    kind, make_run, train = TRAINERS[rerun.trainer]
    config = read_config(rerun, kind)
    replay = Replay(rerun.last_step)
    if rerun.takes_saved:
        replay = Replay(rerun.last_step, rollouts=Path(rerun.run))
    with guard(config.trainer.watchdog):
        check_data(config, Path(rerun.run))
        if is_sampler(count_samplers(config)):
            sample(config, rerun.takes_saved)
            return
        run = make_run(config, replay)
        train(run)
        if isinstance(run, PPORun):
            run.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
