"""Rollouts that a run saved with their tokens, to train on them without an engine."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerBase

from rl2.batch import Sample
from rl2.rollout.sampling import Sampling
from rl2.rollout.trajectory import Trajectory, in_order
from rl2.run.records import read_object

# The columns of a Sample.
COLUMNS = {"tokens": np.int32, "mask": np.int8, "logps": np.float32, "rewards": np.float32}


class StartModel(NamedTuple):
    """The keys of `actor` that say which weights a run starts from."""

    model_name: str
    quantize_base: str | None = None
    adapter: str | None = None  # of a run of an earlier version


def pack_tokens(trajectories: list[Trajectory], tokens_hash: int) -> dict[str, np.ndarray]:
    """Packs the samples of a step.

    Returns COLUMNS [n] of all n tokens, `length` and `trajectory` [samples], and `tokens_hash` as
    `hash_tokens` gives it. With candidates also their counts [n] and the ids of all one after
    another, with routing replay the experts [tokens, routers, choices] of all samples and the
    tokens of each sample that have them.
    """
    samples = [sample for trajectory in in_order(trajectories) for sample in trajectory.samples]
    columns = {
        "length": np.array([len(sample.tokens) for sample in samples], np.int64),
        "trajectory": np.array([sample.trajectory for sample in samples], np.int64),
        "tokens_hash": np.array(tokens_hash),
    }
    for name, dtype in COLUMNS.items():
        arrays = [getattr(sample, name) for sample in samples]
        columns[name] = np.concatenate([np.empty(0, dtype), *arrays])
    if any(sample.candidate_ids for sample in samples):
        counts = np.zeros(len(columns["tokens"]), np.int32)
        starts = columns["length"].cumsum() - columns["length"]
        for start, sample in zip(starts, samples, strict=True):
            counts[start : start + len(sample.candidate_counts)] = sample.candidate_counts
        columns["candidate_counts"] = counts
        columns["candidate_ids"] = np.concatenate(
            [np.array(sample.candidate_ids, np.int32) for sample in samples]
        )
    if any(sample.experts for sample in samples):
        columns["experts"] = np.concatenate([part for sample in samples for part in sample.experts])
        columns["expert_tokens"] = np.array(
            [sum(map(len, sample.experts)) for sample in samples], np.int64
        )
    return columns


def hash_tokens(tokenizer: PreTrainedTokenizerBase, temperature: float) -> int:
    """Hashes what token ids and their log-probabilities mean: the vocabulary and temperature."""
    return zlib.crc32(repr((sorted(tokenizer.get_vocab().items()), temperature)).encode())


class SavedRollouts(Sampling):
    """Reads the rollouts of a run with trainer.save_tokens.

    `path` is the folder of the run. Its steps come in order, and after the last one from the first
    one again. The actor has started from `start_model`. ValueError if a step has no tokens, if they
    have another `tokens_hash`, or no experts of this model where the run `needs_experts`.
    """

    def __init__(
        self,
        path: str,
        start_model: StartModel,
        tokens_hash: int,
        needs_experts: bool = False,
    ):
        self.folder = Path(path, "rollouts", "train")
        self.needs_experts = needs_experts
        self.tokens_hash = tokens_hash
        self.rows_done = 0  # a step is a row here
        steps = sorted(int(file.stem[5:]) for file in self.folder.glob("step_*.safetensors"))
        self.num_steps = len(steps)
        if not steps or steps[-1] > len(steps):
            raise ValueError(
                f"trainer.rollouts_from={path} has the tokens of steps {steps}, and needs those of "
                "1, 2, ...: give the folder of a run with trainer.save_tokens=true from its first "
                "step on"
            )
        actor = read_object(Path(path, "config.yaml")).get("actor", {})
        saved_model = StartModel(
            actor.get("model_name", ""), actor.get("quantize_base"), actor.get("adapter")
        )
        self.has_same_model = saved_model == start_model
        if needs_experts and saved_model.model_name != start_model.model_name:
            raise ValueError(
                f"actor.routing_replay=true: {saved_model.model_name} has sampled {path}, and the "
                f"experts that it chose are not those of {start_model.model_name}: leave it out, "
                "or train that model"
            )
        self.old_policy_is_sampler = True

    def collect(self, step: int) -> list[Trajectory]:
        """Returns the trajectories of training step 1, 2, ..., on every process."""
        path = self.folder / f"step_{(step - 1) % self.num_steps + 1}.jsonl"
        self.rows_done = step
        trajectories, saved = _read_step(path)
        if saved["tokens_hash"] != self.tokens_hash:
            raise ValueError(
                f"{path} was sampled with another tokenizer than that of actor.model_name, or with "
                "another rollout.train_sampling_params.temperature: use those of its config.yaml"
            )
        if self.needs_experts and len(saved["length"]) and "experts" not in saved:
            raise ValueError(
                f"actor.routing_replay=true: {path} was sampled without it and has no experts; "
                "leave it out, or use a run that had it"
            )
        # The start model sampled the first step of any run, and is the actor of ours then.
        self.old_policy_is_sampler = step > 1 or not self.has_same_model
        return trajectories

    def state_dict(self) -> dict[str, Any]:
        return {"rows_done": self.rows_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows_done = state["rows_done"]


def _read_step(path: Path) -> tuple[list[Trajectory], dict[str, np.ndarray]]:
    """(the trajectories of a transcript with their samples, the columns that they are from)."""
    try:
        # Only a line feed ends a line: texts may have others at which str.splitlines cuts.
        with open(path, encoding="utf-8", newline="\n") as lines:
            trajectories = [Trajectory.from_record(json.loads(line)) for line in lines]
        saved = load_file(path.with_suffix(".safetensors"))
        by_id = {trajectory.id: trajectory for trajectory in trajectories}
        for number, *columns in _split_columns(saved):
            trajectory = by_id[number]
            tokens, mask, logps, rewards, counts, ids, experts = columns
            sample = Sample(
                tokens, mask, logps, rewards, trajectory.group, number, counts, ids, experts
            )
            trajectory.samples.append(sample)
        return trajectories, saved
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}, or the .safetensors file beside it, is damaged ({error!r}): restore it, or "
            "give another run with trainer.save_tokens=true"
        ) from error


def _split_columns(saved: dict[str, np.ndarray]) -> Iterator[tuple[Any, ...]]:
    """Yields the trajectory and the columns of each sample of `pack_tokens`."""
    ends = saved["length"].cumsum()
    parts = [np.split(saved[name], ends)[:-1] for name in COLUMNS]
    none: list[Any] = [()] * len(ends)
    counts, ids, experts = none, none, none
    if "candidate_ids" in saved:
        counts = np.split(saved["candidate_counts"], ends)[:-1]
        id_ends = np.concatenate([[0], saved["candidate_counts"].cumsum()])[ends]
        ids = np.split(saved["candidate_ids"], id_ends)[:-1]
    if "experts" in saved:
        chosen = np.split(saved["experts"], saved["expert_tokens"].cumsum())[:-1]
        experts = [[part] for part in chosen]
    yield from zip(saved["trajectory"].tolist(), *parts, counts, ids, experts, strict=True)
