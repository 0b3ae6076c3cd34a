"""A worker: one sharded model with what it does. The actor, the reference and the critic are workers.

It knows no loss, no engine and no rollout. Every process calls the same methods with the same Batch; only the forward
and backward inside are split.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from rl2.batch import Batch
from rl2.model import lora
from rl2.model.token_model import TokenScores, load_model
from rl2.optimizer import schedule
from rl2.packing import pack, plan_micro_batches, unpack, zigzag
from rl2.parallel.fsdp import step_in_parts
from rl2.parallel.mesh import (
    all_reduce_sum_,
    differentiable_all_reduce,
    is_single_process,
    make_mesh,
)
from rl2.parallel.tensor import partial_gradients

BY_NAME = StateDictOptions(
    flatten_optimizer_state_dict=True
)  # so that layouts may group parameters differently


Loss = Callable[[Batch, TokenScores], tuple[Tensor, dict[str, Tensor]]]


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 where the machine is fast at it, fp32 elsewhere."""
    if name == "float32" and device.type == "cuda":
        raise ValueError(
            "dtype=float32: attention on GPUs computes in bfloat16 only; leave dtype=auto"
        )
    if name != "auto":
        return getattr(torch, name)
    fast = (
        device.type == "cuda"
        or torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    )
    return torch.bfloat16 if fast else torch.float32


@dataclass
class UpdateResult:
    """What one optimizer step reports; every process gets the same numbers."""

    loss: float
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # the gradient was not finite, so the weights did not move
    metrics: dict[str, float]  # the loss function's, summed over all tokens

    def to_log(self) -> dict[str, float]:
        """All numbers by the names that the metrics log uses."""
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "skipped": float(self.skipped),
            **self.metrics,
        }


class Worker:
    """`config` is the worker's section of the config; `num_updates` how many updates the schedule is laid out for (0 = a
    frozen model without an optimizer, the reference)."""

    def __init__(self, config, device: torch.device, critic: bool = False, num_updates: int = 0):
        self.config = config
        self.num_updates = num_updates
        self.mesh = make_mesh(device, config.fsdp_size, config.sp_size, config.tp_size)
        self.dtype = compute_dtype(config.dtype, device)
        trained = num_updates > 0
        checkpointing = trained and config.gradient_checkpointing
        adapted = trained and config.lora_rank > 0
        self.adapters = (
            (config.lora_rank, config.lora_alpha, config.lora_targets) if adapted else None
        )
        given = (config.model_name, critic, self.dtype, checkpointing, self.mesh)
        self.model = load_model(*given, masters=trained, adapters=self.adapters)
        self.trained_parameters = {
            name: p for name, p in self.model.named_parameters() if p.requires_grad
        }
        self.version = 0  # how many updates the weights have seen
        self.optimizer = None
        self.offload()
        if trained:
            # Fused even on the CPU: one pass over the memory instead of ten. It takes parameters of one mesh at a time.
            groups = [
                [p for p in self.trained_parameters.values() if p.device_mesh.ndim == n]
                for n in (1, 2, 3)
            ]
            groups = [{"params": group} for group in groups if group]
            self.optimizer = torch.optim.AdamW(
                groups, config.lr, weight_decay=config.weight_decay, fused=True
            )
            if config.optimizer_dir:
                self._import_optimizer(config.optimizer_dir)

    @torch.no_grad()
    def infer(
        self, batch: Batch, temperature: float = 1.0, with_entropy: bool = False
    ) -> TokenScores:
        """The model's scores of every trained token, as columns [B, T] on every process."""
        self.onload()
        shape = batch.mask.shape
        names = (
            ["values"]
            if self.model.is_critic
            else ["logps", "entropy"]
            if with_entropy
            else ["logps"]
        )
        columns = {name: torch.zeros(shape, device=self.mesh.device) for name in names}
        budget = self.config.max_inference_length_per_device or self.config.max_length_per_device
        for rows in self._micro_batches(batch, budget):
            part = batch.select(rows)
            for name, column in vars(self._score(part, temperature, with_entropy)).items():
                if column is not None:
                    columns[name][rows] = column
        for module in self.model.modules():  # without a backward pass nothing else would
            if isinstance(module, FSDPModule):
                module.reshard()
        self.offload()
        # Each cell was computed by one process (by tp alike ones) and is 0 on the others: the sum gathers, and rounds nothing.
        alike = self.mesh.tp is not None and self.mesh.tp.get_local_rank() > 0
        return TokenScores(
            **{
                name: all_reduce_sum_(column * (not alike)).cpu()
                for name, column in columns.items()
            }
        )

    def reference(self) -> Callable[..., TokenScores]:
        """`infer` of the model that this worker started from: its own with the adapters off, at no memory, or that of
        another, frozen worker."""
        if self.adapters:
            return lora.disabled(self.model.hf)(self.infer)  # a context around every call
        return Worker(self.config, self.mesh.device).infer

    def update(
        self,
        batch: Batch,
        loss_fn: Loss,
        temperature: float = 1.0,
        with_entropy: bool = False,
        keep_groups_together: bool = False,
    ) -> UpdateResult:
        """One optimizer step on `batch`. `loss_fn(rows of the batch, their scores [b, T])` returns a sum over tokens that
        `batch.token_weights` have already divided by the global count, and metrics that are such sums too: neither the number
        of processes nor the micro-batches can change the gradient. `whole_groups`: the loss sees all rows of a group, one
        behind the other.
        """
        self.onload()
        totals = {}
        for rows in self._micro_batches(
            batch, self.config.max_length_per_device, keep_groups_together
        ):
            part = batch.select(rows)
            scores = self._score(part, temperature, with_entropy).map(
                lambda column: differentiable_all_reduce(column, self.mesh.sp)
            )
            loss, metrics = loss_fn(_move(part, self.mesh.device), scores)
            (
                loss * self.mesh.fsdp.size()
            ).backward()  # FSDP averages gradients over its processes; this makes it a sum
            for name, value in {"loss": loss.detach(), **metrics}.items():
                totals[name] = totals.get(name, 0.0) + value.float() * self.mesh.reports_metrics
        names = sorted(totals)
        sums = all_reduce_sum_(torch.stack([totals[name].to(self.mesh.device) for name in names]))
        norm, lr = self._step()
        self.offload()
        totals = dict(zip(names, sums.tolist(), strict=True))
        return UpdateResult(
            loss=totals.pop("loss"),
            grad_norm=norm,
            lr=lr,
            skipped=not math.isfinite(norm),
            metrics=totals,
        )

    def iter_full_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by its Hugging Face name, adapters merged in, whole and in `dtype`, one at a time. All processes
        must iterate."""
        self.onload()
        for name, weight in lora.merged(self.model.hf):
            yield name, weight.to(dtype).full_tensor()
        self.offload()

    def export(self, folder: str, tokenizer, with_optimizer: bool = False) -> None:
        """Writes the model as a Hugging Face folder; to its sub-folders what LoRA trained, as peft does (`adapter`), and
        the optimizer's state, which `optimizer_dir` reads (`optimizer`). All processes must call."""
        if self.adapters:
            self.onload()
            lora.save(self.model.hf, f"{folder}/adapter", self.config.model_name)
        full = {}
        for name, tensor in self.iter_full_weights(self.model.stored_dtype):
            if dist.get_rank() == 0:
                full[name] = tensor.cpu()
        if (
            self.model.is_critic
        ):  # transformers reads the value of the last token that is not this one
            self.model.hf.config.pad_token_id = tokenizer.pad_token_id
        if dist.get_rank() == 0:
            self.model.hf.save_pretrained(folder, state_dict=full)
            self.model.hf.config.dtype = self.model.stored_dtype  # it named that of the masters
            self.model.hf.config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        if with_optimizer:
            dcp.save(
                {"optimizer": self._optimizer_state()},
                checkpoint_id=f"{folder}/optimizer",
                no_dist=is_single_process(),
            )
        dist.barrier()

    def _optimizer_state(self):
        return get_optimizer_state_dict(self.model, self.optimizer, options=BY_NAME)

    def _import_optimizer(self, folder):
        folder = f"{folder}/optimizer" if Path(folder, "optimizer").is_dir() else folder
        state = {"optimizer": self._optimizer_state()}
        dcp.load(state, checkpoint_id=folder, no_dist=is_single_process())
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=BY_NAME)

    def state_dict(self) -> dict:
        """What a resumed run needs of this worker: what is trained, its optimizer and version, sharded."""
        model = {name: parameter.detach() for name, parameter in self.trained_parameters.items()}
        return {"model": model, "optimizer": self._optimizer_state(), "version": self.version}

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(
            state["model"], strict=False
        )  # what is frozen or tied is not there
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=BY_NAME)
        self.version = state["version"]

    def onload(self) -> None:
        if self.mesh.device.type != "cpu":
            self.model.to(self.mesh.device)

    def offload(self) -> None:
        """Moves the model to host memory if the config asks for it."""
        if self.config.offload_model and self.mesh.device.type != "cpu":
            self.model.to("cpu")

    def _micro_batches(self, batch, budget, keep_groups_together=False):
        budget, share = budget * self.config.sp_size, self.config.share_prompts
        parts = plan_micro_batches(
            batch, budget, self.mesh.dp_size, share, self.model.attention_cost, keep_groups_together
        )
        return [micro[self.mesh.dp_rank] for micro in parts]

    def _score(self, part, temperature, with_entropy):
        """The scores of the rows as columns, with their gradient; 0 where another process of our ring computes them."""
        ring = self.model.ring
        packed = zigzag(pack(part, self.config.share_prompts), ring.size, ring.rank)
        packed = _move(packed, self.mesh.device)
        scores = self.model(packed, temperature, with_entropy)
        return scores.map(lambda pairs: unpack(packed, pairs, part.mask.shape))

    def _step(self) -> tuple[float, float]:
        """Clips, steps and clears the gradient; a gradient that is not finite is dropped, and nothing moves."""
        gradients = [parameter.grad.to_local() for parameter in self.trained_parameters.values()]
        norm = self._gradient_norm()
        lr = self.config.lr * schedule(
            self.version, self.num_updates, self.config.warmup_ratio, self.config.scheduler
        )
        if math.isfinite(norm):
            torch._foreach_mul_(gradients, min(1.0, self.config.max_grad_norm / (norm + 1e-6)))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if self.config.offload_optimizer:
                step_in_parts(self.optimizer, self.mesh.device)
            else:
                self.optimizer.step()
            self.version += 1
        self.optimizer.zero_grad()
        return norm, lr

    def _gradient_norm(self) -> float:
        """The norm over all parameters and processes. Of what several processes hold alike, each counts its share."""
        if self.mesh.tp is not None:
            for parameter in partial_gradients(self.model.hf):
                dist.all_reduce(parameter.grad.to_local(), group=self.mesh.tp.get_group())
        squares = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for parameter in self.trained_parameters.values():
            sharded = math.prod(
                parameter.device_mesh.size(i)
                for i, p in enumerate(parameter.placements)
                if not p.is_replicate()
            )
            local = parameter.grad.to_local()
            squares += local.norm().double().square() * sharded / dist.get_world_size()
        return all_reduce_sum_(squares).sqrt().item()


def _move(data, device):
    """A dataclass with its tensors on `device`."""
    return replace(
        data, **{name: x.to(device) for name, x in vars(data).items() if isinstance(x, Tensor)}
    )
