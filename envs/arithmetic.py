r"""Questions whose answer is one number.

Row: {"messages": [...], "answer": 7}. The answer is a number or its text, such as "1,234".

One step on a CPU, with a small model in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=arithmetic data.path=examples/rows/arithmetic.jsonl \
        actor.model_name=MODEL trainer.max_steps=1 data.prompts_per_rollout=3 \
        data.responses_per_prompt=2 rollout.train_sampling_params.max_new_tokens=32
"""

import re
from fractions import Fraction

from rl2.rewards.maths import plain
from rl2.rewards.text import conclusion

# Digits, which may have thousands separators, decimals and a minus sign. The minus of a difference
# is not a sign: 5-3 has the numbers 5 and 3.
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)
MAX_CHARACTERS = 1000  # of a number; Python reads no more than 4,300 digits


def reward_fn(messages, answer):
    """1.0 if the last number after the thinking equals the answer, else 0.0."""
    number = extract(messages)
    return float(number is not None and exact_value(number) == exact_value(answer))


def extract(messages):
    """Returns the exact value of the last number after the thinking as a text, or None."""
    numbers = NUMBER.findall(plain(conclusion(messages[-1]["content"])))
    if not numbers or len(numbers[-1]) > MAX_CHARACTERS:
        return None
    return str(exact_value(numbers[-1]))


def exact_value(number):
    """Returns the exact value of a number or of its text: exact_value("1,234.5") == 1234.5."""
    return Fraction(str(number).replace(",", ""))
