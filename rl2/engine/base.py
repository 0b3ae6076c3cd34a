"""What engines are asked and answer, and one token of every row from its logits, by noise that is given.

Shapes: n rows, V vocabulary.
"""

from dataclasses import dataclass

DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": None,
    "stop_token_ids": (),
}


@dataclass
class Generation:
    """What was sampled, the stop token included. logps are of softmax(logits / temperature), before top_p and top_k."""

    tokens: list[int]
    logps: list[float]
    finish_reason: str  # stop | length | abort
    version: int


def check_request(prompt: list[int], params: dict, vocabulary: int, max_length: float) -> dict:
    """`params` with the DEFAULTS (temperature 0 is greedy, top_k -1 off). ValueError for what can never be answered."""
    unknown = set(params) - set(DEFAULTS)
    params = {**DEFAULTS, **params}
    new = params["max_new_tokens"]
    if unknown:
        raise ValueError(
            f"sampling parameters {sorted(unknown)} are unknown; there are {sorted(DEFAULTS)}"
        )
    if not isinstance(new, int) or new < 1:
        raise ValueError(f"max_new_tokens={new}: expected at least 1")
    if not params["temperature"] >= 0 or not 0 < params["top_p"] <= 1:
        raise ValueError(
            f"temperature={params['temperature']}, top_p={params['top_p']}: expected >= 0 and (0, 1]"
        )
    if params["top_k"] != -1 and params["top_k"] < 1:
        raise ValueError(f"top_k={params['top_k']}: expected at least 1, or -1 for off")
    if not prompt:
        raise ValueError("the prompt has no tokens")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise ValueError(
            f"prompt token ids {min(prompt)} to {max(prompt)}: the vocabulary is 0 to {vocabulary - 1}"
        )
    if len(prompt) + new > max_length:
        raise ValueError(
            f"prompt of {len(prompt)} + max_new_tokens={new} exceeds {max_length} tokens"
        )
    return params
