"""How an answer is sampled. Imports no torch, since the config has these defaults too."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """How one answer is sampled. The defaults here are the only declaration of them."""

    temperature: float = 1.0
    """divides the logits; 0 is greedy"""
    top_p: float = 1.0
    """sample from the most likely tokens that hold this share of the probability"""
    top_k: int = -1
    """sample from this many most likely tokens; -1 is all"""
    min_p: float = 0.0
    """sample from tokens with at least this share of the most likely one's probability; 0 is off"""
    repetition_penalty: float = 1.0
    """divides the logits of tokens in prompt and answer (SGLang: in the answer); 1 is off"""
    frequency_penalty: float = 0.0
    """subtracted from a token's logit for each time that the answer has it; 0 is off"""
    presence_penalty: float = 0.0
    """subtracted once from the logits of tokens in the answer; 0 is off"""
    max_new_tokens: int = 512
    """longest answer, in tokens"""
    stop_token_ids: tuple[int, ...] = ()
    """tokens that end the answer"""
    stop: Sequence[str] = ()
    """texts that end the answer with the token that completes one. Special tokens are part of the
    text. Without stop tokens and texts, the answer has max_new_tokens tokens"""
    with_candidates: bool = False
    """for training: an engine that can returns the tokens that top_p, top_k and min_p leave,
    and log-probabilities among these alone"""
    experts_from: int | None = None
    """for training: the engine tells the experts of each token of prompt and answer from this place
    on; None: of none"""
    continued_tokens: int = 0
    """last tokens of the prompt that an aborted request sampled for this answer; a text of `stop`
    may begin in them"""

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)
