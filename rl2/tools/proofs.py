"""The proofs of `rl2 prove` that run the trainer.

Each compares two computations that should be equal, on a small copy of the user's architecture with
random weights in fp32, on the CPU. What both sides share cannot make them differ, so a fault shows
in the proof of its own part.

Shapes: B sequences, T columns, see `batch.Batch`.
"""

import contextlib
import io
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor
from torch.multiprocessing import start_processes
from transformers import AutoConfig, PreTrainedConfig

from rl2.algorithms.losses import token_weights
from rl2.batch import Batch, Sample, collate
from rl2.config.schema import PPOConfig
from rl2.data.chat import ChatTemplate
from rl2.model.admission import (
    GRADIENT_TOLERANCE,
    SCORE_TOLERANCE,
    gradients_of,
    make_plain,
    plain_columns,
    relative_distances,
)
from rl2.model.exact import Exactness
from rl2.model.load import HuggingFaceFiles
from rl2.model.shrink import WINDOW_TOKENS, shrink
from rl2.model.token_model import TokenScores
from rl2.model.towers import freeze_towers, language_model_class
from rl2.parallel.device import GIB
from rl2.trainer.ppo import actor_loss, needs_entropy
from rl2.worker import Worker

CPU = torch.device("cpu")

# Tokens of the prompt and of the answer of each sequence. The second and the third share a prompt.
LENGTHS = ((1, 29), (11, 5), (11, 21), (3, 4), (20, 30))
# A worker of one process that computes as plainly as rl2 can. A step moves the weights by `lr`.
PLAIN: dict[str, Any] = {
    "dither_weights": False,
    "quantize_base": None,  # rows of the small copy need not be whole blocks
    "dtype": "float32",
    "head_dtype": "float32",
    "compile": False,
    "fsdp_size": 0,
    "sp_size": 1,
    "tp_size": 1,
    "max_length_per_device": 4096,
    "max_inference_length_per_device": None,
    "gradient_checkpointing": False,
    "optimizer_dir": None,
    "lr": 0.5,
    "max_grad_norm": 1.0,
    "warmup_ratio": 0.0,
    "scheduler": "constant",
}
STILL: dict[str, Any] = {
    "lr": 0.0,
    "max_grad_norm": math.inf,
    "lora_rank": 0,
    "adapter": None,
}
BUDGET = 64  # tokens of a micro-batch of the layout, so that there are several
MOST_TOKENS = 200  # of a sequence that the whole model runs
# How much farther from fp32 rl2 may be in bf16 than transformers in bf16.
ROUNDING_LIMIT = 2.0
BYTES_PER_WEIGHT = 6  # the model in fp32, or twice in bf16, and a margin
PROCESS_BYTES = 0.7 * GIB  # of a rank with a small model
TIMEOUT = timedelta(minutes=10)  # of what ranks say to each other


class Skipped(Exception):
    """A proof that cannot be run here; the reason is its text."""


class Difference(NamedTuple):
    """How far two results are apart that should be equal."""

    what: str
    largest: float
    limit: float
    where: str
    meaning: str  # what it usually means if the limit is passed

    @property
    def is_ok(self) -> bool:
        return self.largest <= self.limit  # NaN is not


@dataclass
class Subject:
    """What is proved: the config of a PPO run, its template, and a folder for models."""

    config: PPOConfig
    num_processes: int
    template: ChatTemplate
    conversations: list[tuple[list[dict], list | None]]  # (messages, tools)
    folder: str

    @cached_property
    def small(self) -> str:
        """The folder of the small copy.

        Half of its embeddings are tiny, so that the epsilon of the norms matters.
        """
        config = AutoConfig.from_pretrained(self.config.actor.model_name)
        torch.manual_seed(0)
        model_class = language_model_class(config)
        plain = make_plain(model_class, shrink(model_class, config))
        plain.get_input_embeddings().weight.data[::2] *= 0.01
        path = f"{self.folder}/small"
        plain.save_pretrained(path)
        try:
            AutoConfig.from_pretrained(path)
        except ValueError as error:
            raise Skipped("transformers does not read the config of a small copy") from error
        return path

    def worker(
        self, num_updates: int = 1, exactness: Exactness = Exactness.OFF, **changes: Any
    ) -> Worker:
        """Returns a worker with the small copy, plain but for the `changes`."""
        section = replace(self.config.actor, **{**PLAIN, "model_name": self.small, **changes})
        torch.manual_seed(0)  # of adapters
        return Worker(
            section,
            CPU,
            num_updates=num_updates,
            exactness=exactness,
            source=AnyModel(),
            new_optimizer=Descent,
        )

    def samples(self) -> list[Sample]:
        """Random sequences. All of the first one is trained; answers have tokens of tools."""
        vocabulary = AutoConfig.from_pretrained(self.small).get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        samples: list[Sample] = []
        for row, (prompt, answer) in enumerate(LENGTHS):
            size = (prompt + answer,)
            tokens = torch.randint(vocabulary // 3, vocabulary, size, generator=generator).tolist()
            if row == 2:
                tokens[:prompt] = samples[1].tokens[:prompt]
            mask = [0] * prompt + [int(row == 0 or i % 5 != 3) for i in range(answer)]
            samples.append(make_sample(tokens, mask, row))
        samples[1].group = 2
        return samples

    def batch(self) -> Batch:
        """Returns the samples with the weights of the sum that `weighted_sum` is."""
        batch = collate(self.samples())
        weights = torch.linspace(-1.0, 2.0, batch.mask.numel())
        batch.token_weights = weights.view_as(batch.mask)
        return batch

    def run(self, parts: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns (log-probabilities [B, T], gradients of `weighted_sum`); each part is a pack."""
        worker, batch = self.worker(**STILL), self.batch()
        columns = torch.zeros(batch.mask.shape)
        for rows in parts:
            logps: Any = worker.infer(batch.select(rows)).logps
            columns[rows] = logps
            worker.update(batch.select(rows), weighted_sum)
        return columns, worker.optimizer.gradients

    @cached_property
    def alone(self) -> tuple[Tensor, dict[str, Tensor]]:
        """What `run` gives for each sequence alone."""
        return self.run([[row] for row in range(len(LENGTHS))])


def make_sample(
    tokens: list[int], mask: list[int], row: int, logps: list[float] | None = None
) -> Sample:
    """Returns a sequence that is a group and a trajectory of its own."""
    zeros = [0.0] * len(tokens)
    return Sample(tokens, mask, logps or zeros, zeros, row, row)


class AnyModel(HuggingFaceFiles):
    """Refuses no model: the proofs say more than a refusal."""

    def admit(self, name: str, config: PreTrainedConfig, critic: bool) -> None:
        """Admits every model."""


class Descent:
    """Plain gradient descent, since AdamW hides wrong scales. It adds the gradients up."""

    def __init__(
        self,
        kind: str,
        parameters: dict[str, Any],
        matrices: Collection[str],
        weight_decay: float,
        in_host_memory: bool,
        betas: Sequence[float],
    ):
        self.parameters = parameters
        self.gradients: dict[str, Any] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for name, parameter in self.parameters.items():
            name = name.removeprefix("hf.")
            gradient = parameter.grad.full_tensor()
            self.gradients[name] = self.gradients.get(name, 0) + gradient
            parameter -= lr * parameter.grad


def weighted_sum(batch: Batch, scores: TokenScores) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the loss of the gradients that are compared, linear in the log-probabilities."""
    assert scores.logps is not None and batch.token_weights is not None
    return (scores.logps * batch.token_weights).sum(), {}


def compare_columns(
    actual: Any,
    expected: Any,
    meaning: str,
    what: str = "log-probability",
    limit: float = SCORE_TOLERANCE,
) -> Difference:
    """Returns the largest difference of columns [B, T]."""
    differences = (actual - expected).abs().nan_to_num(nan=math.inf)
    row, column = divmod(int(differences.argmax()), differences.shape[1])
    where = f"token {column + 1} of sequence {row}"
    return Difference(what, differences.max().item(), limit, where, meaning)


def compare_named(
    what: str, actual: dict[str, Tensor], expected: dict[str, Tensor], limit: float, meaning: str
) -> Difference:
    """Returns the largest difference of tensors by name, relative to their norms."""
    for name in sorted(actual.keys() ^ expected.keys()):
        where = f"{name}, which only one of the two has"
        return Difference(what, math.inf, limit, where, meaning)
    distances = relative_distances(actual, expected)
    worst = max(distances, key=lambda name: nan_is_largest(distances[name]))
    return Difference(what, distances[worst], limit, worst, meaning)


def nan_is_largest(number: float) -> float:
    """Returns the number, or infinity for NaN: what is not a number is the worst difference."""
    return math.inf if math.isnan(number) else number


def cause_of_position(actual: Tensor, expected: Tensor) -> str:
    """Returns what is usually wrong, from the first position whose log-probability differs."""
    wrong = ~((actual - expected).abs() <= SCORE_TOLERANCE)
    first = int(wrong.any(0).int().argmax())
    if first == 0:
        return (
            "the token after a single one differs, where positions and attention do not count: "
            "look for a missing bias, the epsilon of a norm, a scale or cap of the logits, the "
            "embeddings"
        )
    places = "the positions (RoPE base and scaling) and at which tokens a layer sees"
    if first >= WINDOW_TOKENS - 1:
        places = "sliding windows or chunks"
    return f"the first {first} tokens are right: look at {places}"


def prove_transformers(subject: Subject) -> Iterator[Difference]:
    """Compares rl2, one sequence in a pack, with plain transformers."""
    model_class = language_model_class(AutoConfig.from_pretrained(subject.small))
    plain = model_class.from_pretrained(subject.small, dtype=torch.float32)
    freeze_towers(plain)
    expected = plain_columns(plain, subject.samples())
    weighted_sum(subject.batch(), TokenScores(logps=expected))[0].backward()
    expected = expected.detach()
    trained = [(name, weight) for name, weight in plain.named_parameters() if weight.requires_grad]
    gradients = {name: torch.zeros_like(weight) for name, weight in trained}
    gradients |= gradients_of(plain)  # experts that no token chose have none
    actual, actual_gradients = subject.alone
    others = (actual != 0) != (expected != 0)
    meaning = "other tokens are trained than the samples say: is the mask shifted?"
    yield Difference("other trained tokens", others.sum().item(), 0, "all sequences", meaning)
    actual, expected = actual.masked_fill(others, 0), expected.masked_fill(others, 0)
    yield compare_columns(actual, expected, cause_of_position(actual, expected))
    meaning = "if only one has a weight, a tie is lost or an adapter left; otherwise see above"
    yield compare_named("gradient", actual_gradients, gradients, GRADIENT_TOLERANCE, meaning)


def prove_real_weights(subject: Subject) -> Iterator[Difference]:
    """Compares both in bf16, with the model's own weights, with transformers in fp32."""
    name = subject.config.actor.model_name
    config = AutoConfig.from_pretrained(name)
    model_class = language_model_class(config)
    with init_empty_weights():
        empty = model_class.from_config(config)
    needed = empty.num_parameters() * BYTES_PER_WEIGHT / GIB
    free = psutil.virtual_memory().available / GIB
    if needed > free:
        raise Skipped(f"the model needs about {needed:.0f} GiB of memory, and {free:.0f} are free")
    samples = []
    for row, (messages, _) in enumerate(subject.conversations[:4]):
        text = "\n".join(str(message["content"]) for message in messages)
        tokens = subject.template.tokenize(text)[:MOST_TOKENS]
        samples.append(make_sample(tokens, [1] * len(tokens), row))

    def plain(dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            model = model_class.from_pretrained(name, dtype=dtype)
            return plain_columns(model, samples)

    exact, rounded = plain(torch.float32), plain(torch.bfloat16)
    worker = subject.worker(0, model_name=name, dtype="bfloat16")
    logps: Any = worker.infer(collate(samples)).logps
    ours = (logps - exact).abs().sum()
    ratio = ours / (rounded - exact).abs().sum()
    where = f"{exact.count_nonzero()} tokens, the mean is {ours / exact.count_nonzero():.2g}"
    meaning = "more than rounding: do the weights of the folder belong to its config.json?"
    what = "difference from float32, in those of transformers"
    yield Difference(what, ratio.item(), ROUNDING_LIMIT, where, meaning)


def prove_packed(subject: Subject) -> Iterator[Difference]:
    """Compares all sequences in one pack with each of them alone."""
    actual, gradients = subject.run([list(range(len(LENGTHS)))])
    expected, expected_gradients = subject.alone
    meaning = (
        "sequences of one pack see each other, or positions do not restart; with "
        "actor.share_prompts=false each answer carries its own prompt"
    )
    yield compare_columns(actual, expected, meaning)
    yield compare_named("gradient", gradients, expected_gradients, GRADIENT_TOLERANCE, meaning)


def train_once(subject: Subject, batch: Batch, **changes: Any) -> dict[str, Any]:
    """Makes a step with the actor's own loss. Returns columns, numbers and changes of weights."""
    config = subject.config
    worker = subject.worker(**changes)
    before = {name: weight.clone() for name, weight in worker.iter_full_weights(torch.float32)}
    logps = worker.infer(batch).logps
    loss = partial(actor_loss, config.actor, config.kl)
    result = worker.update(batch, loss, with_entropy=needs_entropy(config.actor))
    numbers = {"loss": torch.tensor(result.loss), "norm": torch.tensor(result.grad_norm)}
    steps = {}
    for name, weight in worker.iter_full_weights(torch.float32):
        steps[name] = (weight - before[name]).float()
    return {"logps": logps, "numbers": numbers, "steps": steps}


def fit_layout(subject: Subject) -> tuple[int, dict[str, Any]]:
    """Returns (processes, sizes) of the layout nearest to the requested one that can run here.

    The machine and the heads of the small copy limit it.
    """
    actor = subject.config.actor
    text: Any = AutoConfig.from_pretrained(subject.small).get_text_config()
    tp = math.gcd(actor.tp_size, getattr(text, "num_key_value_heads", None) or 1)
    asked = subject.num_processes * tp // actor.tp_size
    room = int(psutil.virtual_memory().available / PROCESS_BYTES)
    most = min(asked, room, max(4, 2 * (os.cpu_count() or 1)))
    for fsdp, sp in product((actor.fsdp_size, min(2, actor.fsdp_size)), (actor.sp_size, 2)):
        unit = tp * math.lcm(sp, fsdp or 1)
        if unit <= most:
            return most // unit * unit, {"fsdp_size": fsdp, "sp_size": sp, "tp_size": tp}
    raise Skipped(f"the smallest such layout has {unit} processes, more than {most}")


def prove_layout(subject: Subject) -> Iterator[Difference]:
    """Compares the requested layout, in gloo processes, with one process."""
    if subject.num_processes == 1:
        raise Skipped("one process is asked for: --processes N says how many there will be")
    count, sizes = fit_layout(subject)
    actor, batch = subject.config.actor, subject.batch()
    generator = torch.Generator().manual_seed(1)
    logps = subject.alone[0]
    for name in ("old_logps", "ref_logps", "engine_logps", "advantages"):
        noise = torch.randn(logps.shape, generator=generator) * batch.mask
        setattr(batch, name, noise if name == "advantages" else logps + 0.1 * noise)
    average = (actor.average, actor.average_constant)
    batch.token_weights = token_weights(batch.mask, batch.trajectory, *average, batch.group)
    expected = train_once(subject, batch)
    checkpointing = bool(actor.gradient_checkpointing)
    changes = {**sizes, "max_length_per_device": BUDGET, "gradient_checkpointing": checkpointing}
    path = f"{subject.folder}/layout"
    torch.save((subject, batch, changes, count), path)
    start_processes(run_rank, (path,), count, start_method="forkserver")
    ranks = torch.load(f"{path}.results", weights_only=False)
    settings = " ".join(f"{key}={size}" for key, size in sizes.items())
    layout = f"({count} of {subject.num_processes} processes, {settings})"
    meaning = "the processes combine their parts of a sequence or of a matrix wrongly"
    found = [compare_columns(ranks["logps"], expected["logps"], meaning)]
    meaning = "a constant factor means that gradients are summed or averaged over wrong processes"
    for key, what, limit in (
        ("numbers", "loss or gradient norm", SCORE_TOLERANCE),
        ("steps", "change of a weight in a step", GRADIENT_TOLERANCE),
    ):
        found.append(compare_named(what, ranks[key], expected[key], limit, meaning))
    for difference in found:
        yield difference._replace(where=f"{difference.where} {layout}")


def run_rank(rank: int, path: str) -> None:
    """One process of the layout. Rank 0 writes what `train_once` gives."""
    subject, batch, changes, count = torch.load(path, weights_only=False)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    store = dist.FileStore(f"{path}.store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=TIMEOUT)
    with contextlib.redirect_stdout(io.StringIO()):
        results = train_once(subject, batch, **changes)
    if rank == 0:
        torch.save(results, f"{path}.results")
    dist.barrier()
    dist.destroy_process_group()
