"""Runs steps of a recorded run again. `rl2 replay` starts one process or several of it:

    [torchrun ...] -m rl2.tools.rerun --run RUN --out FOLDER --step N ...

It trains as the run did, and leaves out what changes no weights: evaluations, checkpoints, exports,
services. It ends after step N. The schedule of the learning rate is that of the whole run.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl2.config.parse import parse
from rl2.config.schema import DPOConfig, PPOConfig, RMConfig, SFTConfig, worker_names
from rl2.data.rows import hash_data
from rl2.run.changes import DATA
from rl2.run.signals import guard
from rl2.trainer import dpo, ppo, rm, sft
from rl2.trainer.ppo_run import PPORun
from rl2.trainer.recorder import Replay

# The name of the config's class -> (the class, what makes the run, what trains it).
TRAINERS: dict[str, tuple[type, Callable[..., Any], Callable[[Any], None]]] = {
    "PPOConfig": (PPOConfig, PPORun, ppo.train),
    "SFTConfig": (SFTConfig, sft.make_run, sft.train),
    "DPOConfig": (DPOConfig, dpo.make_run, dpo.train),
    "RMConfig": (RMConfig, rm.make_run, rm.train),
}


def change_config(config: Any, out: Path, checkpoint: Path | None) -> None:
    """Sets the places of the run, and turns off what it writes besides its records."""
    config.trainer.save_dir = str(out)
    config.trainer.resume = str(checkpoint or "auto")
    config.trainer.save_freq = config.trainer.report_freq = None
    config.trainer.loggers = []
    for name in worker_names(config):
        section = getattr(config, name)
        section.save_dir = section.save_freq = None


def check_data(config: Any, recorded: Path) -> None:
    """ValueError if the training rows are not those of the recorded run."""
    before = json.loads((recorded / "run.json").read_text())["identity"]["contents"].get(DATA)
    now = hash_data(config.data.path)
    if before and now and before != now:
        raise ValueError(
            f"{DATA}={config.data.path} has another content than when {recorded} was recorded "
            f"(SHA-256 {before[:16]} then, {now[:16]} now): give back the rows of then"
        )


def rerun(arguments: argparse.Namespace) -> None:
    """Runs the steps after the checkpoint until `arguments.step`. All processes must call."""
    kind, make_run, train = TRAINERS[arguments.trainer]
    recipe = ["--config-dir", str(arguments.config.parent), "--config-name", "config.yaml"]
    config = parse(kind, recipe)
    change_config(config, arguments.out, arguments.checkpoint)
    replay = Replay(arguments.step)
    if arguments.rollouts == "saved":
        replay = Replay(arguments.step, rollouts=arguments.run)
    with guard(config.trainer.watchdog):
        check_data(config, arguments.run)
        run = make_run(config, replay)
        train(run)
        run.close()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rl2.tools.rerun")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trainer", choices=TRAINERS, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--rollouts", required=True)
    rerun(parser.parse_args())


if __name__ == "__main__":
    main()
