"""What a person and a program see of a run: one line a step, metrics.jsonl, wandb, trajectories."""

import json
import math
import os
import resource
import time
from collections import deque
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from rl2.parallel.mesh import gather_objects


class Metrics:
    """Writes to `folder`; the first process does the writing. `start` steps are done already."""

    def __init__(self, folder, start: int, num_steps: int, wandb: dict | None = None):
        self.folder, self.times = Path(folder), {}
        self.first, self.num_steps, self.recent = dist.get_rank() == 0, num_steps, deque(maxlen=10)
        self.wandb = _start_wandb(wandb, self.folder) if wandb and self.first else None
        if self.first:
            self.bar = tqdm(
                total=num_steps,
                initial=start,
                unit="step",
                dynamic_ncols=True,
                disable=None,
                smoothing=0.1,
            )

    @contextmanager
    def phase(self, name: str):
        """Adds the seconds spent inside to time/`name` of this step."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start

    def log(self, step: int, values: dict[str, float]) -> None:
        """One object in metrics.jsonl and one line on the console for a finished step."""
        times = {f"time/{name}": seconds for name, seconds in self.times.items()}
        self.times = {}
        total = sum(times.values())
        values = {
            "step": step,
            **values,
            **times,
            "time/step": total,
            "memory/peak_gib": peak_memory(),
        }
        if tokens := values.get("tokens/sampled") or values.get("tokens/total"):
            values["tokens/per_second"] = tokens / total
        if not self.first:
            return
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({key: _plain(value) for key, value in values.items()}) + "\n")
            file.flush()
            os.fsync(
                file.fileno()
            )  # a checkpoint may follow, and must not survive a line of its own
        if self.wandb:
            self.wandb.log(values, step=step)
        self.bar.update(step - self.bar.n)
        self.recent.append(total)
        left = sum(self.recent) / len(self.recent) * (self.num_steps - step)
        self.bar.write(f"{_line(values, self.num_steps)}  {timedelta(seconds=round(left))} left")

    def write_trajectories(self, purpose: str, step: int, records: list[dict]) -> None:
        """Every process's records to rollouts/`purpose`/step_N.jsonl, in the order of the data."""
        gathered = gather_objects(records)
        if self.first:
            path = self.folder / "rollouts" / purpose / f"step_{step}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            records = sorted(
                (record for part in gathered for record in part), key=lambda record: record["id"]
            )
            lines = [json.dumps(record, ensure_ascii=False, default=str) for record in records]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def say(self, text: str) -> None:
        """A line on the console, once."""
        if self.first:
            self.bar.write(text)

    def close(self) -> None:
        if self.first:
            self.bar.close()
        if self.wandb:
            self.wandb.finish()


def prepare_folder(folder: str | os.PathLike, step: int) -> None:
    """Makes the output folder ready to go on after `step`: what lies behind it is cut, since it will be made again.
    A folder with an earlier run that is not resumed is kept under another name."""
    folder = Path(folder)
    metrics = folder / "metrics.jsonl"
    if step == 0 and metrics.exists() and metrics.stat().st_size:
        number = next(
            n for n in range(1, 10**6) if not folder.with_name(f"{folder.name}.{n}").exists()
        )
        folder.rename(folder.with_name(f"{folder.name}.{number}"))
        print(
            f"{folder} held an earlier run without a checkpoint to resume: it is now {folder.name}.{number}",
            flush=True,
        )
    folder.mkdir(parents=True, exist_ok=True)
    if metrics.exists():
        kept = [
            line
            for line in metrics.read_text().splitlines()
            if _step(line) is not None and _step(line) <= step
        ]
        partial = metrics.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept))
        partial.replace(metrics)
    for path in folder.glob("rollouts/*/step_*.jsonl"):
        if int(path.stem[5:]) > step:
            path.unlink()


def _step(line):
    """The step of a line of metrics.jsonl; None for one that a kill cut short."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return None


def peak_memory() -> float:
    """The most memory this process has used, in GiB: the GPU's if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _plain(value):
    """A number that JSON can hold."""
    value = float(value) if not isinstance(value, int) else value
    return value if math.isfinite(value) else None


def _line(values, num_steps):
    shown = [("reward/mean", "reward", "{:.3f}"), ("test/reward/mean", "test reward", "{:.3f}")]
    shown += [
        ("rollout/length", "length", "{:.1f}"),
        ("actor/loss", "loss", "{:+.4f}"),
        ("actor/kl", "kl", "{:.4f}"),
    ]
    shown += [
        (f"{place}accuracy", f"{place}accuracy", "{:.3f}")
        for place in ("actor/", "critic/", "test/")
    ]
    shown += [("test/loss", "test loss", "{:.4f}"), ("test/perplexity", "perplexity", "{:.3f}")]
    shown += [("actor/grad_norm", "grad", "{:.2f}"), ("tokens/per_second", "tok/s", "{:.0f}")]
    parts = [f"{name} {form.format(values[key])}" for key, name, form in shown if key in values]
    phases = [
        (key[5:], seconds)
        for key, seconds in values.items()
        if key.startswith("time/") and key != "time/step"
    ]
    spent = " ".join(f"{name} {seconds:.1f}" for name, seconds in phases if seconds >= 0.05)
    return f"step {values['step']}/{num_steps}  {'  '.join(parts)}  {values['time/step']:.1f}s ({spent})"


def _start_wandb(settings, folder):
    try:
        import wandb
    except ImportError:
        print(
            "wandb is not installed: metrics go to metrics.jsonl only (pip install wandb, or trainer.disable_wandb=true)"
        )
        return None
    if not (wandb.api.api_key or os.environ.get("WANDB_MODE")):
        print(
            "wandb is not logged in: metrics go to metrics.jsonl only (wandb login, or trainer.disable_wandb=true)"
        )
        return None
    return wandb.init(dir=str(folder), resume="allow", **settings)
