"""Updates of workers in several layouts.

test_worker.py runs this in several ranks: `parity.py MODEL OUT FAMILY` makes two SGD updates in
every layout of this world size and saves the results to the file OUT.
"""

import os
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from common import make_samples
from torch.distributed.fsdp import FSDPModule

from rl2.batch import collate
from rl2.config.schema import ActorConfig
from rl2.model.token_model import TokenScores
from rl2.parallel.mesh import init_distributed
from rl2.parallel.offload import local_shard
from rl2.worker import Worker

LEARNING_RATE = 0.1
MAX_GRAD_NORM = 0.05
# World size -> (fsdp_size, sp_size, tp_size): every pure layout, the hybrid one, and mixes. One
# process runs policies and critics, each with many micro-batches and with one.
LAYOUTS = {
    1: [(0, 1, 1)] * 4,
    2: [(0, 1, 1), (1, 1, 1), (0, 2, 1), (1, 2, 1), (0, 1, 2)],
    3: [(0, 1, 1), (0, 3, 1)],
    4: [
        (0, 1, 1),
        (2, 1, 1),
        (0, 4, 1),
        (0, 2, 1),
        (2, 2, 1),
        (1, 4, 1),
        (0, 1, 2),
        (0, 2, 2),
        (1, 2, 2),
        (1, 1, 2),
    ],
}
# Adapters have rank 3. Of their matrices A [3, in] three processes hold one row each; of four
# processes one holds none.
ADAPTED = {
    1: [],
    2: [(0, 1, 1), (1, 1, 1), (0, 2, 1), (1, 2, 1), (0, 1, 2)],
    3: [(0, 1, 1)],
    4: [(0, 1, 1), (2, 2, 1), (0, 1, 2), (0, 2, 2), (1, 1, 2)],
}
# Tokens of a micro-batch: there are many of them, of which some are empty, or there is one.
SMALL_BUDGET, LARGE_BUDGET = 60, 4096


def layouts_of(family: str, world: int) -> list[dict]:
    """The arguments of `two_steps` for each run of a model in a world of this size.

    A layout has one run of a family. That of the other family differs in the model, the sharing of
    prompts and the number of micro-batches, and four layouts in a row have the eight choices. The
    families have the adapted layouts in turn. Every second layout keeps the gathered weights.
    """
    is_llama = family == "llama"
    names = ("fsdp_size", "sp_size", "tp_size")
    runs = []
    for number, sizes in enumerate(LAYOUTS[world]):
        critic = is_llama ^ bool(number % 2)
        is_large = is_llama ^ bool(number // 2 % 2)
        changes = {
            "critic": critic,
            "share_prompts": is_llama ^ critic ^ is_large,
            "max_length_per_device": LARGE_BUDGET if is_large else SMALL_BUDGET,
            "gradient_checkpointing": False if is_large else 1,  # of two layers
            "keep_gathered": bool(number % 2),
        }
        runs.append(changes | dict(zip(names, sizes, strict=True)))
    for number, sizes in enumerate(ADAPTED[world]):
        if is_llama != bool(number % 2):
            continue
        changes = {
            "critic": bool(number // 2 % 2),
            "max_length_per_device": SMALL_BUDGET,
            "gradient_checkpointing": True,
            "keep_gathered": not number // 2 % 2,
            "lora_rank": 3,
            "lora_alpha": 5.0,
        }
        runs.append(changes | dict(zip(names, sizes, strict=True)))
    return runs


def worker_config(model_name: str, **changes) -> ActorConfig:
    """A worker's section of the config: its defaults, and fp32, a short budget and large steps."""
    settings = {
        "dtype": "float32",
        "gradient_checkpointing": False,
        "max_length_per_device": 4096,
        "lr": LEARNING_RATE,
        "max_grad_norm": MAX_GRAD_NORM,
    }
    return ActorConfig(model_name=model_name, **{**settings, **changes})


def make_worker(name, device, critic=False, num_updates=8, **changes) -> Worker:
    """A worker of the model `name`, or of its critic, always with the same adapters."""
    config = worker_config(f"{name}-critic" if critic else name, **changes)
    torch.manual_seed(0)
    return Worker(config, device, critic, num_updates)


def full_weights(worker, dtype=torch.float32) -> dict:
    """Copies of its weights by their names in transformers."""
    return {key: weight.clone() for key, weight in worker.iter_full_weights(dtype)}


def make_batch(longest=20):
    """Groups of random rows with advantages, token weights and ages. Prompts are masked."""
    batch = collate(make_samples(seed=1, num_groups=3, longest=longest))
    torch.manual_seed(0)
    batch.advantages = torch.randn(batch.mask.shape) * batch.mask
    batch.token_weights = batch.mask / batch.mask.sum()
    batch.ages = batch.mask * (torch.arange(batch.mask.shape[1]) % 3).float()
    return batch


def policy_loss(batch, scores):
    weights = 1.0 if batch.ages is None else 0.9**batch.ages
    gains = scores.logps * batch.advantages * weights
    loss = -((gains + 0.1 * scores.entropy) * batch.token_weights).sum()
    return loss, {"entropy": (scores.entropy * batch.token_weights).sum().detach()}


def value_loss(batch, scores):
    return ((scores.values - batch.advantages).square() * batch.token_weights).sum(), {}


def two_steps(name, critic, device, batch, **changes):
    """Scores before two SGD updates, what each update reports, and the weights after them.

    Names of weights are Hugging Face's. Where there are adapters, they are among the weights, with
    peft's names, and merged too; `initial_adapters` are the trained parameters before the updates.
    """
    worker = make_worker(name, device, critic, num_updates=10, **changes)
    use_sgd(worker)
    initial_adapters = {}
    if worker.config.lora_rank:
        for key, parameter in worker.trained_parameters.items():
            initial_adapters[key] = parameter.detach().full_tensor().clone()
    scores = worker.score(batch, 0.9, with_entropy=not critic)
    loss = value_loss if critic else policy_loss
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        updates = [worker.update(batch, loss, 0.9, with_entropy=not critic) for _ in range(2)]
    weights = dict(worker.iter_full_weights(torch.float32))
    return {
        # FSDP is the only caller that names an operation.
        "sums_over_copies": sum("op" in call.kwargs for call in all_reduce.call_args_list),
        "sharded_modules": sum(isinstance(m, FSDPModule) for m in worker.model.modules()),
        "scores": vars(scores),
        "updates": [update.to_log() for update in updates],
        "weights": weights | dict(worker.iter_trained_weights(torch.float32)),
        "version": worker.version,
        "initial_adapters": initial_adapters,
    }


def plain_scores(model, batch, temperature=1.0) -> TokenScores:
    """Log-probabilities and entropies by a plain model on padded rows."""
    log_p = (model(batch.inputs).logits / temperature).log_softmax(-1)
    logps = log_p.gather(2, batch.targets[..., None].long())[..., 0] * batch.mask
    return TokenScores(logps=logps, entropy=-(log_p.exp() * log_p).sum(-1) * batch.mask)


def plain_steps(model, score, loss):
    """As `two_steps`, of a plain model. `score(model, batch)` gives its TokenScores."""
    batch = make_batch()
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    scores, updates = [], []
    for _ in range(2):
        scores.append(score(model, batch))
        value, metrics = loss(batch, scores[-1])
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        sgd.step()
        sgd.zero_grad()
        updates.append({"loss": value.item(), "grad_norm": norm.item(), **metrics})
    return {
        "scores": vars(scores[0].map(torch.Tensor.detach)),
        "updates": updates,
        "weights": {key: weight.detach() for key, weight in model.named_parameters()},
    }


def assert_equal_steps(result, expected, layout, tolerance=5e-5, norm_tolerance=1e-4):
    """Compares what two layouts give in `two_steps`: scores, gradients' norms, and weights."""
    for key, scores in expected["scores"].items():
        if scores is not None:
            torch.testing.assert_close(
                result["scores"][key], scores, rtol=0, atol=tolerance, msg=f"{layout} {key}"
            )
    for update, wanted in zip(result["updates"], expected["updates"], strict=True):
        assert abs(update["loss"] - wanted["loss"]) <= 1e-5, layout
        error = abs(update["grad_norm"] / wanted["grad_norm"] - 1)
        assert error <= norm_tolerance, layout
    assert result["weights"].keys() == expected["weights"].keys()
    for key, weight in expected["weights"].items():
        torch.testing.assert_close(
            result["weights"][key], weight, rtol=0, atol=1e-6, msg=f"{layout} {key}"
        )


def use_sgd(worker):
    """Gives the worker plain gradient descent: AdamW hides wrong scales."""

    @torch.no_grad()
    def step(lr):
        for parameter in worker.trained_parameters.values():
            local_shard(parameter).sub_(local_shard(parameter.grad), alpha=lr)

    worker.optimizer = SimpleNamespace(step=step)


def gradients_by_sgd(worker, batch, loss):
    """(the gradient of an update by the name of the weight, what the update reports)."""
    use_sgd(worker)
    before = full_weights(worker)
    result = worker.update(batch, loss)
    after = full_weights(worker)
    return {key: (before[key] - after[key]) / result.lr for key in before}, result


def assert_equal_gradients(gradients, expected, atol):
    """Where nothing is expected of a weight, its gradient is 0."""
    for key, gradient in gradients.items():
        wanted = expected.get(key, torch.zeros(())).expand_as(gradient)
        torch.testing.assert_close(
            gradient, wanted, rtol=1e-3, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
        )


def save_layouts(update, layouts, name, out):
    """Saves update(name, **changes) of each layout. Every process of a test calls it."""
    init_distributed()
    results = {layout: update(name, **changes) for layout, changes in layouts.items()}
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.barrier()


if __name__ == "__main__":
    name, out, family = sys.argv[1:]
    layouts = dict(enumerate(layouts_of(family, int(os.environ["WORLD_SIZE"]))))
    update = partial(two_steps, device=torch.device("cpu"), batch=make_batch())
    save_layouts(update, layouts, name, out)
