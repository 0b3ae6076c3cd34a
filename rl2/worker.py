"""A worker is one sharded model with what it does: the actor, the reference or the critic.

A worker scores, updates, gives its full weights away, exports itself, and saves and restores its
state. It knows no loss, no engine and no rollout. Every process calls the same methods with the
same Batch; only the forward and backward passes are split.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from rl2.batch import Batch, Pack
from rl2.config.conditions import Exactness
from rl2.config.schema import WorkerConfig
from rl2.error_report import writing
from rl2.model.attachment import ModelSettings
from rl2.model.exact import EngineCheck
from rl2.model.load import FILES, HuggingFaceFiles, load_model
from rl2.model.token_model import TokenScores, own_weights
from rl2.optimizer import AdamW, Muon, clip_gradient_, gradient_norm, hidden_matrices, schedule
from rl2.packing import pack, plan_micro_batches, unpack, zigzag
from rl2.parallel.device import (
    columns_to_device,
    compute_dtype,
    copy_to_device,
    device_kind,
)
from rl2.parallel.fsdp import persistent_buffers
from rl2.parallel.mesh import all_reduce_sum_, differentiable_all_reduce, make_mesh
from rl2.parallel.offload import WeightMemory
from rl2.parallel.rank import is_first_rank
from rl2.parallel.tensor import all_reduce_partial_gradients
from rl2.progress import track
from rl2.run.checkpoints import export_optimizer, import_optimizer

# A loss maps b rows of the batch and their scores [b, T] to (loss, metrics), all of them scalars.
# Each is a sum over the rows' tokens, weighted by `token_weights`. These are divided by counts of
# the whole batch, so that the sums over all micro-batches and processes are the means that the user
# asked for, however the batch is split.
Loss = Callable[[Batch, TokenScores], tuple[Tensor, dict[str, Tensor]]]
# Whether an update is skipped, from the metrics of its loss, summed over the whole batch.
Skip = Callable[[dict[str, float]], bool]


@dataclass
class UpdateResult:
    """What one optimizer step reports; every process gets the same numbers."""

    loss: float
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # no weight moved: the gradient was not finite, or the loss asked for it
    metrics: dict[str, float]  # the loss function's, summed over all micro-batches and processes
    reported: dict[str, float]  # by the attachments of the model

    def to_log(self, total_weight: float = 1.0) -> dict[str, float]:
        """All numbers by the names that the metrics log uses.

        `total_weight` is the sum of the token weights that were run: metrics divided by it are
        means. They are left out where no token was run.
        """
        numbers = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "skipped": float(self.skipped),
        }
        means = {}
        if total_weight:
            means = {name: total / total_weight for name, total in self.metrics.items()}
        return numbers | self.reported | means


class Worker:
    """One model, sharded over all processes.

    `config` is the worker's section of the config. `num_updates` is how many updates the learning
    rate's schedule is laid out for; 0 makes a frozen model without an optimizer, such as the
    reference. `exactness` says whether it computes with the bits of the embedded engine. `source`
    gives the model.
    """

    def __init__(
        self,
        config: WorkerConfig,
        device: torch.device,
        critic: bool = False,
        num_updates: int = 0,
        exactness: Exactness = Exactness.OFF,
        source: HuggingFaceFiles = FILES,
    ):
        self.config = config
        self.exactness = exactness
        self.source = source
        self.num_updates = num_updates
        self.version = 0  # updates that the weights have seen
        self.mesh = make_mesh(device, config.fsdp_size, config.sp_size, config.tp_size)
        self.dtype = compute_dtype(config.dtype, device)
        is_trained = num_updates > 0
        self.settings = ModelSettings(config, self.dtype, critic, is_trained)
        self.model, self.weights = load_model(self.settings, self.mesh, exactness, source)
        self.engine_check = EngineCheck(self.model.exactness)
        # All are DTensors, but within `self.weights.computing()`.
        self.parameters = cast(dict[str, DTensor], dict(self.model.named_parameters()))
        self.trained_parameters = {n: p for n, p in self.parameters.items() if p.requires_grad}
        offload_model = config.offload_model and device_kind(device) != "cpu"
        self.memory = WeightMemory(self.model, in_host_memory=offload_model)
        self.optimizer: Any = None  # unless the model is frozen
        if is_trained:
            options = (config.weight_decay, config.offload_optimizer, config.betas)
            if config.optimizer == "muon":
                matrices = {f"hf.{name}" for name in hidden_matrices(self.model.hf)}
                self.optimizer = Muon(self.trained_parameters, matrices, *options)
            else:
                self.optimizer = AdamW(self.trained_parameters, *options)
            if config.optimizer_dir:
                import_optimizer(self.optimizer, config.optimizer_dir)

    @torch.no_grad()
    def score(
        self, batch: Batch, temperature: float = 1.0, with_entropy: bool = False
    ) -> TokenScores:
        """Returns the scores of every trained token: columns [B, T] in host memory.

        Every process gets all of them. A critic gives `values`; other models give `logps`, and
        `entropy` if asked.
        """
        columns: dict[str, Tensor] = {}
        budget = self.config.max_inference_length_per_device or self.config.max_length_per_device
        with self.passes():
            for rows in track(self._micro_batches(batch, budget)):
                scores = self._score_rows(batch.select(rows), temperature, with_entropy)
                index = copy_to_device(torch.tensor(rows, dtype=torch.int64), self.mesh.device)
                for name, cells in scores.items():
                    if name not in columns:
                        columns[name] = torch.zeros(batch.mask.shape, device=self.mesh.device)
                    columns[name][index] = cells
        return TokenScores(**columns).map(self._sum_over_processes)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """A context for forward passes without a gradient."""
        with self.memory.on_device(), self.weights.computing():
            yield

    def reference(self) -> "Worker | SharedReference":
        """Returns what scores with the model that this worker started from."""
        if self.settings.freezes_base:
            return SharedReference(self)
        return Worker(self.config, self.mesh.device, exactness=self.exactness, source=self.source)

    def copy_weights(self, source: "Worker") -> None:
        """Takes the weights of `source`, a worker of the same layout, from shard to shard.

        They are rounded to the dtype of this worker.
        """
        for name, parameter in self.parameters.items():
            self.memory.state(parameter).copy_(source.memory.state(source.parameters[name]))

    def update(
        self,
        batch: Batch,
        loss_fn: Loss,
        temperature: float = 1.0,
        with_entropy: bool = False,
        keep_groups_together: bool = False,
        skip: Skip | None = None,
        teacher: "Worker | None" = None,
    ) -> UpdateResult:
        """Takes one optimizer step on `batch`.

        No weight moves if `skip` says so. With `teacher`, whose layout must be the same, the loss
        gets the scores `teacher_kl`.

        Neither the number of processes nor the micro-batches change the gradient, see `Loss`. With
        `keep_groups_together` the loss sees all rows of a group at once, one after the other.
        """
        totals: dict[str, Tensor] = {}
        micro_batches = self._micro_batches(
            batch, self.config.max_length_per_device, keep_groups_together
        )
        reported: dict[str, float] = {}
        with self.memory.on_device(changes=True), ExitStack() as stack:
            stack.enter_context(self.weights.computing())
            if teacher is not None:
                stack.enter_context(teacher.passes())
            run_forward = partial(self._run_forward, batch, micro_batches)
            for part in self.model.attachments:
                # FSDP averages the gradients of its processes; this factor makes it a sum.
                reported |= stack.enter_context(part.in_update(run_forward, self.mesh.fsdp.size()))
            for i, rows in enumerate(track(micro_batches), 1):
                micro_batch = batch.select(rows)
                self.weights.before_backward(is_last=i == len(micro_batches))
                scores = self._score_rows(micro_batch, temperature, with_entropy, teacher)
                # The processes of a ring computed different columns; each continues with whole
                # sequences.
                scores = scores.map(partial(differentiable_all_reduce, group=self.mesh.sp))
                loss, metrics = loss_fn(columns_to_device(micro_batch, self.mesh.device), scores)
                # FSDP averages the gradients of its processes; this factor makes it a sum.
                (loss * self.mesh.fsdp.size()).backward()
                for name, value in (metrics | {"loss": loss.detach()}).items():
                    value = value.float() * self.mesh.reports_metrics
                    totals[name] = totals.get(name, 0.0) + value
            stack.close()  # the passes have ended: the weights may change
            sums, norm = self._sum_up(totals)
            lr, skipped = self._step(norm, skip is not None and skip(sums))
        return UpdateResult(
            loss=sums.pop("loss"),
            grad_norm=norm,
            lr=lr,
            skipped=skipped,
            metrics=sums,  # without the loss
            reported=reported,
        )

    @torch.no_grad()
    def _run_forward(self, batch: Batch, micro_batches: list[list[int]]) -> None:
        """Runs the body of the model, for what its hooks count."""
        for rows in track(micro_batches):
            self.model.head_inputs(self._pack(batch.select(rows)))

    def iter_full_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter by its Hugging Face name, whole and in `dtype`, one at a time.

        Adapters are merged in, and 4-bit weights dequantised. The buffers that belong to the
        weights follow, in their own dtype.
        Only one weight at a time of a model in host memory is on the device.
        All processes must iterate to the end.
        """
        yield from _whole(self.model.iter_weights(self.memory.read), dtype)
        yield from persistent_buffers(self.model.hf)

    def iter_unmerged_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """As `iter_full_weights`, but with the adapters beside the weights that they adapt.

        The names are those of a model with the same adapters, see lora.py.
        """
        yield from _whole(own_weights(self.model.hf, self.memory.read), dtype)
        yield from persistent_buffers(self.model.hf)

    def iter_trained_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Those of `iter_unmerged_weights` that are trained: the adapters of an actor."""
        trained = own_weights(self.model.hf, self.memory.read, trained_only=True)
        yield from _whole(trained, dtype)

    def export(
        self, folder: str, tokenizer: PreTrainedTokenizerBase, with_optimizer: bool = False
    ) -> None:
        """Writes the model as a Hugging Face folder. All processes must call.

        It is in the dtype of the forward pass, so it is the model that was trained: float32 weights
        of a model that computes in bfloat16 would be another one.

        LoRA's adapters also go to `folder`/adapter, as peft writes them. The optimizer's state goes
        to `folder`/optimizer, which the key `optimizer_dir` reads.
        """
        with writing(folder):
            self._save_model(folder, tokenizer)
            for part in self.model.attachments:
                part.save(self.model.hf, folder, self.memory.read)
            if with_optimizer:
                export_optimizer(self.optimizer, folder)
        dist.barrier()

    def _save_model(self, folder: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Rank 0 writes. All processes make the whole weights."""
        full = {}
        for name, weight in self.iter_full_weights(self.dtype):
            if dist.get_rank() == 0:
                full[name] = weight.cpu()
        if dist.get_rank() > 0:
            return
        hf = self.model.hf
        if self.model.is_critic:
            # transformers reads the value at the last token that is not this one.
            hf.config.pad_token_id = tokenizer.pad_token_id
        hf.save_pretrained(folder, state_dict=full)
        hf.config.dtype = self.dtype  # save_pretrained wrote that of our parameters
        hf.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def state_dict(self) -> dict[str, Any]:
        """Returns the sharded state that a resumed run needs.

        The weights are the trained ones, or all of a frozen worker. `dtype` is what the forward
        pass rounded them to.
        """
        parameters = self.trained_parameters or self.parameters
        state: dict[str, Any] = {"version": self.version, "dtype": str(self.dtype)}
        state["model"] = {name: self.memory.state(value) for name, value in parameters.items()}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Warns of another dtype: it is another policy."""
        if state["dtype"] != str(self.dtype) and self.optimizer is not None and is_first_rank():
            print(
                f"the checkpoint was trained in {state['dtype']} and goes on in {self.dtype}: its "
                "weights round to another model than the one that was trained, so metrics may "
                "jump; only the dtype of the first start continues with the same model"
            )
        for name, weight in self.state_dict()["model"].items():
            weight.copy_(state["model"][name])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]

    def _micro_batches(self, batch, budget, keep_groups_together=False) -> list[list[int]]:
        """Returns the rows of each micro-batch on this process.

        `budget` is in tokens of one process; the processes of a ring share a sequence.
        """
        plan = plan_micro_batches(
            batch,
            budget * self.config.sp_size,
            self.mesh.dp_size,
            self.config.share_prompts,
            self.model.attention_cost,
            keep_groups_together,
            repeats_prompts=self.model.repeats_prompts,
        )
        return [ranks[self.mesh.dp_rank] for ranks in plan]

    def _score_rows(
        self, rows: Batch, temperature, with_entropy, teacher: "Worker | None" = None
    ) -> TokenScores:
        """Returns the scores of the rows as columns [b, T], differentiable.

        A ring splits the columns over its processes: a cell is 0 where another one computes it.
        """
        packed = self._pack(rows)
        head_inputs = None
        if teacher is not None:  # which runs the same pack, and has no gradient
            with torch.no_grad():
                head_inputs = teacher.model.head_inputs(packed, temperature)
        scores = self.model(packed, temperature, with_entropy, head_inputs)  # [P]
        if scores.logps is not None:
            self.engine_check.compare(rows, packed, scores.logps)
        return scores.map(lambda pairs: unpack(packed, pairs, rows.mask.shape))

    def _pack(self, rows: Batch) -> Pack:
        """This process's part of the rows in one pack, on its device."""
        ring = self.model.ring
        packed = zigzag(pack(rows, self.config.share_prompts), ring.size, ring.rank)
        return columns_to_device(packed, self.mesh.device)

    def _sum_over_processes(self, column: Tensor) -> Tensor:
        """Returns the cells of all processes in one column [B, T], in host memory.

        A cell is 0 on all processes but the one that computed it, so the sum is exact. The
        processes of a tp group compute the same cells; the first of them counts.
        """
        tp = self.mesh.tp
        is_copy = tp is not None and tp.get_local_rank() > 0
        return all_reduce_sum_(column * (not is_copy)).cpu()

    def _sum_up(self, totals: dict[str, Tensor]) -> tuple[dict[str, float], float]:
        """The scalars, summed over all processes, and the gradient's norm.

        The host waits here for the device, once an update.
        """
        if self.mesh.tp is not None:
            all_reduce_partial_gradients(self.model.hf, self.mesh.tp.get_group())
        norm = gradient_norm(self.trained_parameters.values())
        names = sorted(totals)
        sums = torch.stack([totals[name].to(self.mesh.device) for name in names])
        *values, norm = torch.cat([all_reduce_sum_(sums).double(), norm[None]]).tolist()
        return dict(zip(names, values, strict=True)), norm

    def _step(self, norm: float, skip: bool) -> tuple[float, bool]:
        """Clips the gradient, steps and clears it.

        Returns the fields `lr` and `skipped` of UpdateResult.

        A gradient that is not finite is skipped too: no weight moves, and the schedule does not
        either. Where no token is trained the gradient is 0: the schedule moves on, and the weights
        stay, without the decay and the momentum of AdamW.
        """
        config = self.config
        parameters = self.trained_parameters.values()
        clip_gradient_(parameters, norm, config.max_grad_norm)
        lr = config.lr * schedule(
            self.version,
            self.num_updates,
            config.warmup_ratio,
            config.scheduler,
            config.min_lr_ratio,
        )
        skip = skip or not math.isfinite(norm)
        if not skip:
            if norm > 0:
                self.optimizer.step(lr)
            self.version += 1
        for parameter in parameters:
            parameter.grad = None
        return lr, skip


def _whole(
    weights: Iterable[tuple[str, DTensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Gathers sharded weights one at a time, in `dtype`. All processes must iterate to the end."""
    for name, weight in weights:
        shard = cast(DTensor, weight.to(dtype))
        del weight  # which may be a copy: its memory is free before the next one is read
        yield name, shard.full_tensor()
        del shard


class SharedReference:
    """The model that a worker with adapters started from: its own, without what it has learned.

    It takes no memory beside that of the worker.
    """

    def __init__(self, worker: Worker):
        self.worker = worker
        self.config = worker.config
        self.mesh = worker.mesh

    def score(self, batch: Batch, temperature: float = 1.0) -> TokenScores:
        """As `Worker.score`, where the routers choose."""
        worker = self.worker
        # With old log-probabilities nothing is compared with the engine, which has other weights.
        batch = replace(batch, experts=None, old_logps=batch.engine_logps)
        with ExitStack() as stack:
            for part in worker.model.attachments:
                stack.enter_context(part.at_start(worker.model.hf))
            return worker.score(batch, temperature)
