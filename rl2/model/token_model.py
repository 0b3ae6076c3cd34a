"""The token model: a Hugging Face body and a head that scores chosen tokens only.

Shapes: L packed tokens, P scored pairs, E hidden size, V vocabulary, B sequences, T columns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl2.attention.pages import MIN_ROWS
from rl2.attention.ring import PackedAttention, Ring
from rl2.batch import Pack
from rl2.config.conditions import Exactness
from rl2.model.attachment import Attachment, Read
from rl2.model.classes import idle_parts
from rl2.model.head import full_kl, head_scores
from rl2.model.logits import CandidateMask, HeadInputs, LogitSettings
from rl2.progress import track


@dataclass
class TokenScores:
    """What a model says about the scored tokens: pairs [P], or columns [B, T] once unpacked."""

    logps: Tensor | None = None  # log-probability of each token
    entropy: Tensor | None = None  # entropy of the distribution that the token is drawn from
    values: Tensor | None = None  # a critic's value of the state before the token
    teacher_kl: Tensor | None = None  # KL(policy || teacher) of the token's distributions

    def map(self, function: Callable[[Tensor], Tensor]) -> "TokenScores":
        """`function` applied to each of the tensors that are there."""
        return TokenScores(**{name: function(column) for name, column in self.items()})

    def items(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of those that are there."""
        return [(name, column) for name, column in vars(self).items() if column is not None]


class TokenModel(nn.Module):
    """`hf` with its head replaced by scores of (hidden state, target) pairs.

    Logits [L, V] never exist. The model is always in eval mode: with dropout, the ratio of two
    probabilities of a token would be noise.

    Where `exactness` is on, log-probabilities have the bits of the embedded engine's on a CPU. It
    is off for a model that is cut over processes, and for one that cannot have them; ValueError if
    they are demanded of the latter, and for a model whose head cannot be replaced. `attachments`
    are those of `hf`.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        ring: Ring,
        tp: dist.ProcessGroup | None = None,
        exactness: Exactness = Exactness.OFF,
        attachments: Sequence[Attachment] = (),
    ):
        super().__init__()
        if hf.base_model is hf:
            raise ValueError(
                f"{type(hf).__name__} of transformers has no body apart from its head, whose place "
                "rl2's own head would take"
            )
        self.hf = hf
        self.ring = ring
        self.tp = tp
        self.attachments = attachments
        self.repeats_prompts = any(part.repeats_prompts for part in attachments)
        self.attention_cost = attention_cost(hf)
        self.is_critic = hf.get_output_embeddings() is None
        is_whole = ring.size == 1 and tp is None
        obstacle = next((part.inexact for part in attachments if part.inexact), None)
        if LogitSettings.of(hf.config).divisor != 1.0:
            obstacle = "divides its logits, which the engine and the trainer do at different places"
        self.exactness = exactness if is_whole and obstacle is None else Exactness.OFF
        if exactness is Exactness.DEMANDED and obstacle is not None:
            raise ValueError(
                f"rollout.exact=true: {type(hf).__name__} {obstacle}; leave rollout.exact out"
            )
        self.eval()

    def forward(
        self,
        pack: Pack,
        temperature: float = 1.0,
        with_entropy: bool = False,
        teacher: HeadInputs | None = None,
    ) -> TokenScores:
        """The scores of the pairs [P]: a critic's values, else log-probabilities and entropies.

        With `teacher`, which is for the same pairs, also the KL divergences from it.
        """
        if self.is_critic:
            # In fp32: bf16 has too few numbers to tell similar rewards apart.
            values = self._hidden(pack).float() @ self.hf.get_parameter("score.weight")[0].float()
            return TokenScores(values=values)
        head = self._head_inputs(pack, temperature)
        logps, entropy = head_scores(
            head, pack.targets, with_entropy, group=self.tp, exact=self.exactness.is_on
        )
        scores = TokenScores(logps=logps, entropy=entropy)
        if teacher is not None:
            scores.teacher_kl = full_kl(head, teacher, group=self.tp)
        return scores

    def head_inputs(self, pack: Pack, temperature: float = 1.0) -> HeadInputs:
        """What the head of a teacher multiplies for the pairs of `pack`.

        To FSDP this is a forward pass of its own. The weight is valid until it is resharded.
        """
        return self._head_inputs(pack, temperature)

    def _head_inputs(self, pack: Pack, temperature: float) -> HeadInputs:
        """What the head multiplies for the pairs of `pack`."""
        hidden = self._hidden(pack)
        head = self.hf.get_output_embeddings()
        weight, bias = head.weight, getattr(head, "bias", None)
        if self.tp is not None:
            weight = weight.to_local()
            bias = None if bias is None else bias.to_local()
        candidates = None
        if pack.candidate_counts is not None and pack.candidate_ids is not None:
            # As columns of this process's part of the vocabulary; the parts are in order of rank.
            offset = len(weight) * dist.get_rank(self.tp) if self.tp else 0
            candidates = CandidateMask.of(pack.candidate_counts, pack.candidate_ids - offset)
        settings = LogitSettings.of(self.hf.config, temperature, candidates)
        return HeadInputs(hidden, weight, settings, bias)

    def _hidden(self, pack: Pack) -> Tensor:
        """The last hidden states [P, E] of the pairs."""
        assert pack.chunks is not None, "zigzag has not cut the pack"
        attend = PackedAttention(
            pack.chunks, pack.prefixes, pack.tokens.device, self.ring, self.exactness.is_on
        )
        missing = max(0, MIN_ROWS - pack.tokens.shape[1]) if self.exactness.is_on else 0
        tokens = F.pad(pack.tokens, (0, missing))
        positions = F.pad(pack.positions, (0, missing))
        for part in self.attachments:
            part.before_forward(pack, attend.layout, tokens.shape[1])
        body = self.hf.base_model(tokens, position_ids=positions, use_cache=False, attend=attend)
        hidden = body.last_hidden_state[0, pack.hidden_index]
        if hidden.requires_grad:  # compiled layers do not keep `attend` for the backward pass
            hidden.register_hook(lambda gradient, kept=attend: None)
        return hidden

    def iter_weights(self, read: Read) -> Iterator[tuple[str, DTensor]]:
        """Every parameter of the model that is exported by its Hugging Face name, sharded.

        `read` gives one on the device.
        """
        for part in self.attachments:
            weights = part.iter_exported(self.hf, read)
            if weights is not None:
                return weights
        return own_weights(self.hf, read)


def own_weights(
    hf: PreTrainedModel, read: Read, trained_only: bool = False
) -> Iterator[tuple[str, DTensor]]:
    """The parameters of `hf` by name. One at a time is read."""
    parameters = [x for x in hf.named_parameters() if x[1].requires_grad or not trained_only]
    for name, parameter in track(parameters, "weights"):
        yield name, read(parameter)


def attention_cost(hf: PreTrainedModel) -> float:
    """The c in n + c n^2, which a sequence of n tokens costs in units of a token's matrix products.

    The forward pass of n tokens takes 2 n FLOPs a weight, and causal attention 2 n^2 FLOPs a layer
    and query channel, so c is layers x query channels / weights. Where weights are in 4 bits their
    bytes are counted, so c is up to 1.8 times that: it only says which sequences run together.
    """
    config = hf.config.get_text_config()
    head_dim = config.hidden_size // config.num_attention_heads
    try:
        head_dim = getattr(config, "head_dim", None) or head_dim
    except RuntimeError:  # layers differ (Gemma 4), and an estimate is enough
        pass
    channels = config.num_hidden_layers * config.num_attention_heads * head_dim
    size = sum(parameter.numel() for parameter in hf.parameters())
    for part in idle_parts(hf):
        size -= sum(parameter.numel() for parameter in part.parameters())
    return channels / size
