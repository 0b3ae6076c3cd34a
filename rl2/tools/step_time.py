"""The least seconds of a PPO step on H100s, by a roofline: of sampling and of training.

Every part takes the time that its FLOPs or its bytes need at the rates below, those of
benchmarks/roofline.py. Communication hides behind computing, and an environment takes no time. So
the figures are bounds: a real step is slower. They are meant to be compared with each other.
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from transformers import PreTrainedConfig

from rl2.model.towers import find_towers, language_model_class

# What an H100 SXM reaches: assumptions, not measurements of ours.
MATMUL_FLOPS = 650e12  # a second, of large matrix products
MEMORY_BYTES = 2.7e12  # a second
COLLECTIVE_SECONDS = 20e-6  # of a small sum over the GPUs of an engine

FORWARD, BACKWARD = 2, 4  # FLOPs a weight and token
WEIGHT_BYTES = 2  # of bfloat16, also of a key or value
NAMES_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelCosts:
    """What a token costs in a model."""

    weights: int  # of layers and head, which an engine reads in every step
    active_weights: int  # of these, those that a token is multiplied by
    num_layers: int
    kv_numbers: int  # of keys and values that a token leaves, in all layers
    attention_flops: int  # of a token for each token before it, in all layers

    def forward_flops(self, tokens: float, squares: float) -> float:
        """FLOPs of a pass over sequences of `tokens` in all, `squares` being the sum of the squares
        of their lengths.
        """
        return FORWARD * self.active_weights * tokens + self.attention_flops * squares / 2


def count_costs(config: PreTrainedConfig) -> ModelCosts:
    """Returns the costs of a model. Its layers are counted as if all saw all tokens."""
    with torch.device("meta"):
        model = language_model_class(config).from_config(config)
    text = config.get_text_config()
    weights = model.num_parameters()
    weights -= sum(p.numel() for _, tower in find_towers(model) for p in tower.parameters())
    if not text.tie_word_embeddings:  # else the same matrix is the head
        weights -= model.get_input_embeddings().weight.numel()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    num_experts = next((getattr(text, n) for n in NAMES_OF_EXPERTS if getattr(text, n, 0)), 1)
    chosen = getattr(text, "num_experts_per_tok", None) or num_experts
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return ModelCosts(
        weights=weights,
        active_weights=weights - experts + experts * chosen // num_experts,
        num_layers=text.num_hidden_layers,
        kv_numbers=2 * text.num_hidden_layers * kv_heads * head_dim,
        attention_flops=4 * text.num_hidden_layers * heads * head_dim,
    )


@dataclass(frozen=True)
class Rollout:
    """The answers of a step: `num_samples` to each prompt, which have `prompt` tokens."""

    prompt: int
    num_samples: int
    lengths: Sequence[int]  # of the answers, those to a prompt after each other


def log_normal_lengths(
    count: int, median: float, spread: float, longest: int, rng: random.Random | None = None
) -> list[int]:
    """`count` lengths whose logarithms have the standard deviation `spread`, cut at `longest`.

    Drawn by `rng`; else the quantiles of the distribution, in an order that is always the same.
    """
    if rng is not None:
        exact = [rng.lognormvariate(math.log(median), spread) for _ in range(count)]
    else:
        normal = NormalDist(math.log(median), spread)
        exact = [math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
        random.Random(0).shuffle(exact)
    return [min(longest, max(1, round(length))) for length in exact]


def sampling_seconds(
    costs: ModelCosts, rollout: Rollout, num_gpus: int, tp_size: int, max_running: int
) -> float:
    """Seconds until the last engine has sampled its part of the rollout, see `engine_seconds`."""
    return max(engine_seconds(costs, rollout, num_gpus, tp_size, max_running))


def engine_seconds(
    costs: ModelCosts, rollout: Rollout, num_gpus: int, tp_size: int, max_running: int
) -> list[float]:
    """Seconds that each engine of `tp_size` GPUs takes for its part of the rollout.

    Prompts are dealt out in turn. An engine computes each prompt once, and decodes `max_running`
    answers at a time; it has room for their keys and values.
    """
    num_engines = num_gpus // tp_size
    size = rollout.num_samples
    groups = [rollout.lengths[i : i + size] for i in range(0, len(rollout.lengths), size)]
    seconds = []
    for engine in range(num_engines):
        own = groups[engine::num_engines]
        prefill = costs.forward_flops(rollout.prompt * len(own), rollout.prompt**2 * len(own))
        lengths = [length for group in own for length in group]
        decode = _decoding_seconds(costs, lengths, rollout.prompt, tp_size, max_running)
        seconds.append(prefill / (tp_size * MATMUL_FLOPS) + decode)
    return seconds


def _decoding_seconds(
    costs: ModelCosts, lengths: list[int], prompt: int, tp_size: int, max_running: int
) -> float:
    """Seconds of one engine for answers of these lengths, begun in this order."""
    waiting = iter(lengths)
    ends: list[int] = []  # of the answers that run: the step of their last token
    begins = 0  # the sum of the steps at which these began
    starts: dict[int, list[int]] = {}  # end -> the steps at which the answers with it began
    step, seconds = 0, 0.0
    while True:
        while len(ends) < max_running and (length := next(waiting, None)) is not None:
            heapq.heappush(ends, step + length)
            starts.setdefault(step + length, []).append(step)
            begins += step
        if not ends:
            return seconds
        count, end = len(ends), ends[0]
        middle = (step + end) / 2
        context = count * (prompt + middle) - begins  # tokens whose keys are read, on average
        flops = FORWARD * costs.active_weights * count + costs.attention_flops * context
        read = WEIGHT_BYTES * (costs.weights + costs.kv_numbers * context)
        one = max(flops / MATMUL_FLOPS, read / MEMORY_BYTES) / tp_size
        if tp_size > 1:
            one += 2 * costs.num_layers * COLLECTIVE_SECONDS
        seconds += one * (end - step)
        step = end
        while ends and ends[0] == end:
            heapq.heappop(ends)
        begins -= sum(starts.pop(end))


def training_seconds(
    forward: Sequence[ModelCosts],
    trained: Sequence[tuple[ModelCosts, int]],
    rollout: Rollout,
    num_gpus: int,
    recomputes: bool,
) -> float:
    """Seconds to train on the rollout with `num_gpus`, which share its tokens evenly.

    `forward` are the models that score it, each as often as it does; `trained` are those that learn
    from it, with their passes over it. They compute each prompt once for its answers.
    `recomputes`: the backward pass computes the layers again.
    """
    num_prompts = len(rollout.lengths) // rollout.num_samples
    tokens = rollout.prompt * num_prompts + sum(rollout.lengths)
    squares = rollout.prompt**2 * num_prompts
    squares += sum(length * (length + 2 * rollout.prompt) for length in rollout.lengths)
    flops = sum(costs.forward_flops(tokens, squares) for costs in forward)
    passes = (FORWARD + BACKWARD) / FORWARD + recomputes
    for costs, count in trained:
        flops += passes * count * costs.forward_flops(tokens, squares)
    return flops / (num_gpus * MATMUL_FLOPS)
