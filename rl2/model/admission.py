"""Admission: a model is refused at start unless rl2 computes what transformers computes.

A small copy of its architecture with random weights runs as rl2 runs it (several sequences in one
pack, some with a shared prompt) and as transformers does (each sequence alone, with the model's own
attention and head). Scores and gradients must agree. A list of what is not supported would miss the
next architecture; this needs none.

Shapes: B sequences, T columns, see `batch.Batch`.
"""

import sys
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from rl2.attention.ring import Ring
from rl2.batch import Batch, Sample, collate
from rl2.config.schema import WorkerConfig
from rl2.model.attachment import ModelSettings
from rl2.model.classes import AutoClass, idle_parts, language_model_class
from rl2.model.features import attach_all
from rl2.model.shrink import FIRST_PLAIN_TOKEN, VOCABULARY, shrink
from rl2.model.token_model import TokenModel
from rl2.packing import pack, unpack, zigzag
from rl2.parallel.fsdp import persistent_buffers
from rl2.parallel.mesh import broadcast_object

# Rounding in fp32 makes differences of about 1e-5; all that were seen of wrong models are above
# 1e-2.
SCORE_TOLERANCE = 1e-3
GRADIENT_TOLERANCE = 1e-2  # relative, of the gradient of each weight
# Large weights, so that a cap on the logits changes them visibly.
WEIGHT_GAIN = 2.0
# Prompt and answer tokens of the sequences; the first two have the same prompt. Some are shorter
# and some are longer than a window, which a copy that is not shrunk by it must not see.
LENGTHS = ((11, 5), (11, 21), (3, 4), (20, 30), (2, 3))
OUTSIDE_THE_INTERFACE = "its attention does not go through transformers' attention interface"


# By the config's text and whether it is a critic.
_verdicts: dict[tuple[str, bool], str | None] = {}


def admit(name: str, config: PreTrainedConfig, critic: bool = False) -> None:
    """ValueError if rl2 computes another function than transformers for the model `name`.

    Rank 0 tries it, in some seconds; all processes must call. The random state is unchanged.
    """
    verdict = None
    if dist.get_rank() == 0:
        key = (config.to_json_string(), critic)
        if key not in _verdicts:
            _verdicts[key] = find_problem(config, critic)
        verdict = _verdicts[key]
    verdict = broadcast_object(verdict)
    if verdict is not None:
        raise ValueError(
            f"model_name={name} ({config.model_type}): {verdict}. Choose another model; "
            "docs/models.md lists the families that work"
        )


def find_problem(config: PreTrainedConfig, critic: bool = False) -> str | None:
    """Why rl2 cannot train this architecture, in words; None if it can."""
    model_class = AutoModelForSequenceClassification if critic else language_model_class(config)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which also seeds the GPUs.
        torch.default_generator.manual_seed(0)
        try:
            small = shrink(model_class, config)
            plain = make_plain(model_class, small)
            samples = _make_samples()
            expected = _backward(plain_columns(plain, samples))
        except Exception as error:  # whatever a strange architecture does
            return f"a small copy of it, which rl2 tries at start, does not run ({_text(error)})"
        try:
            hf = model_class.from_config(small, attn_implementation="rl2", dtype=torch.float32)
            hf.load_state_dict(plain.state_dict())
            attached = attach_all(ModelSettings(WorkerConfig(), torch.float32), hf)
            model = TokenModel(hf, Ring(), attachments=attached)
            batch = collate(samples)
            actual = _backward(packed_columns(model, batch))
            return _compare(model, plain, batch, actual, expected)
        except Exception as error:
            reason = _text(error)
            if not isinstance(error, ValueError) and not _uses_the_interface(plain):
                reason = OUTSIDE_THE_INTERFACE
            return f"rl2 cannot run it ({reason})"


def _uses_the_interface(hf: PreTrainedModel) -> bool:
    """Whether the code of `hf` looks attention up in transformers' table of functions."""
    return hasattr(sys.modules[type(hf).__module__], "ALL_ATTENTION_FUNCTIONS")


def _text(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args == ("rl2",):
        return OUTSIDE_THE_INTERFACE
    if isinstance(error, ValueError):  # in words, such as those of the attention's hook
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def make_plain(model_class: AutoClass, config: PreTrainedConfig) -> PreTrainedModel:
    """Returns the model with the attention of transformers and random weights, in fp32."""
    try:
        plain = model_class.from_config(
            deepcopy(config), attn_implementation="eager", dtype=torch.float32
        )
    except ValueError:
        plain = model_class.from_config(deepcopy(config), dtype=torch.float32)
    _randomise(plain)
    return plain.eval()


def _randomise(hf: PreTrainedModel) -> None:
    """Random values for weights and buffers, also for those that begin as 0 or 1.

    Not for those of towers, which nothing reads.
    """
    buffers = [buffer for _, buffer in persistent_buffers(hf)]
    idle: set[int] = set()
    for tower in idle_parts(hf):
        idle.update(map(id, tower.state_dict(keep_vars=True).values()))
    for tensor in list(hf.parameters()) + buffers:
        if id(tensor) in idle or not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape)
        if tensor.dim() >= 2:
            tensor.data.copy_(noise * (WEIGHT_GAIN / tensor.shape[-1] ** 0.5))
        else:
            tensor.data.add_(0.3 * noise)


def _make_samples() -> list[Sample]:
    """Makes sequences of the LENGTHS above."""
    samples: list[Sample] = []
    for row, (prompt, answer) in enumerate(LENGTHS):
        tokens = torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (prompt + answer,)).tolist()
        if row == 1:
            tokens[:prompt] = samples[0].tokens[:prompt]
        zeros = [0.0] * len(tokens)
        mask = [0] * prompt + [1] * answer
        samples.append(Sample(tokens, mask, zeros, zeros, group=max(row, 1), trajectory=row))
    return samples


def packed_columns(model: TokenModel, batch: Batch) -> Tensor:
    """Computes [B, T] log-probabilities or values as rl2 does, all rows in one pack."""
    packed = zigzag(pack(batch), size=1, rank=0)
    scores = model(packed)
    pairs = scores.values if model.is_critic else scores.logps
    assert pairs is not None
    return unpack(packed, pairs, batch.mask.shape)


def plain_columns(hf: PreTrainedModel, samples: list[Sample]) -> Tensor:
    """Computes [B, T] log-probabilities or values as transformers does, each sequence alone.

    They come from the samples themselves, so that a wrong batch shows.
    """
    columns: list[Tensor] = []
    critic_values: list[Tensor] = []
    if hf.get_output_embeddings() is None:
        # The model returns the value of the last token only.
        hf.get_submodule("score").register_forward_hook(
            lambda _, inputs, values: critic_values.append(values)
        )
    for sample in samples:
        tokens = torch.tensor(sample.tokens)[None]
        logits = hf(tokens[:, :-1], use_cache=False).logits
        if critic_values:
            scores = critic_values.pop()[0, :, 0]
        else:
            log_p = logits[0].float().log_softmax(-1)
            scores = log_p.gather(1, tokens[0, 1:, None])[:, 0]
        columns.append(scores * torch.tensor(sample.mask)[1:])
    return pad_sequence(columns, batch_first=True)


def relative_distances(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Returns how far each tensor of `expected` is from the one in `actual`, relative to its norm.

    A tensor that is almost 0 is measured by the norm of all of them.
    """
    total = torch.stack([tensor.norm() for tensor in expected.values()]).norm()
    distances = {}
    for name, tensor in expected.items():
        distance = (actual[name] - tensor).norm() / (tensor.norm() + 1e-3 * total)
        distances[name] = distance.item()
    return distances


def _backward(columns: Tensor) -> Tensor:
    """Gives the weights the gradients of a weighted sum. Returns the columns without a graph."""
    weights = torch.linspace(-1.0, 2.0, columns.numel()).view_as(columns)
    (columns * weights).sum().backward()
    return columns.detach()


def _compare(
    model: TokenModel, plain: nn.Module, batch: Batch, actual: Tensor, expected: Tensor
) -> str | None:
    """Returns what differs between the models or their columns, in words; None if nothing does."""
    kind = "values" if model.is_critic else "log-probabilities"
    differences = (actual - expected).abs()
    if not differences.max() <= SCORE_TOLERANCE:  # also if it is NaN
        return f"its {kind} are not those of transformers, by up to {differences.max():.2g}"
    with torch.no_grad():  # as `Worker.score` runs it
        inferred = packed_columns(model, batch)
    if not (inferred - actual).abs().max() <= SCORE_TOLERANCE:
        return f"its {kind} without a gradient are not those with one"
    return _compare_gradients(model.hf, plain)


def _compare_gradients(hf: nn.Module, plain: nn.Module) -> str | None:
    ours, theirs = gradients_of(hf), gradients_of(plain)
    for name, parameter in hf.named_parameters():
        if (name in ours) != (name in theirs):
            return f"rl2 does not use its weight {name} as transformers does"
        if name not in ours and parameter.requires_grad:
            return f"its weight {name} takes no part in the scores of a text"
    for name, distance in relative_distances(ours, theirs).items():
        if not distance <= GRADIENT_TOLERANCE:  # also if it is NaN
            return f"the gradient of its weight {name} is not that of transformers"
    return None


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of the weights that have one, by the names of the weights."""
    parameters = model.named_parameters()
    return {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}
