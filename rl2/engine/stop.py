"""Where an answer ends because its text holds a stop string.

Stop strings are searched in the text, special tokens included, and not among the token ids: the
model may write one in other tokens than the tokenizer would, and one may end inside a token.
"""

from bisect import bisect_left
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rl2.engine.base import SamplingParams

# Tokens in front of a stop string that are decoded with it: decoders drop the space of the first
# token, and the first bytes may be the end of a character.
CONTEXT_TOKENS = 4


class StopSearch:
    """Looks for the stop strings of a request in the text of its answer, as the tokens arrive.

    A stop string may begin in the tokens of the prompt that belong to the answer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], params: SamplingParams
    ):
        self.tokenizer = tokenizer
        self.strings = strings = params.stop
        # A token has at least one byte of text, so these tokens hold the longest string.
        self.window = max(len(string.encode()) for string in strings) + CONTEXT_TOKENS
        answer = prompt[len(prompt) - params.continued_tokens :]
        self.tail = list(answer[-self.window :])

    def feed(self, tokens: list[int]) -> int | None:
        """How many of the answer's next `tokens` it takes to complete a stop string.

        None if they complete none.
        """
        seen = len(self.tail)
        tokens = self.tail + tokens
        self.tail = tokens[-self.window :]

        def has_stop_string(end: int) -> bool:
            text = self.tokenizer.decode(
                tokens[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            return any(string in text for string in self.strings)

        if not has_stop_string(len(tokens)):
            return None
        ends = range(len(tokens) + 1)  # has_stop_string is false up to one of them, and then true
        return bisect_left(ends, True, lo=seen + 1, key=has_stop_string) - seen
