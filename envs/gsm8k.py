r"""Word problems whose answer is a number after ####, as in the solutions of GSM8K.

Row: {"messages": [...], "answer": "72"}. The answer is a number, its text, or a solution that ends
in "#### 72", as the data set has it.

The prompt should ask for it, for instance: "Reason step by step, then write the number after ####."

One step on a CPU, with a small model in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=gsm8k data.path=examples/rows/gsm8k.jsonl \
        actor.model_name=MODEL trainer.max_steps=1 data.prompts_per_rollout=3 \
        data.responses_per_prompt=2 rollout.train_sampling_params.max_new_tokens=32
"""

from rl2.rewards.maths import asked_scale, is_other_unit, quantity, same_number
from rl2.rewards.text import conclusion


def reward_fn(messages, answer):
    """Two reward parts for the line after the last #### of the reply, outside of <think>.

    right: 1.0 if its number is the answer, else 0.0.
    format: 0.1 if it is one number, which may have a unit, else 0.0. "3 or 4" is two.
    """
    expected = str(answer).rpartition("####")[2]
    number = extract(messages)
    is_right = same_number(number, expected) and not is_other_unit(_line(messages), messages)
    return {"right": float(is_right), "format": 0.0 if number is None else 0.1}


def extract(messages):
    """Returns the exact number after the last #### of the reply as a text, or None.

    60% is 60 if the question asks for a percentage, else 0.6.
    """
    number = quantity(_line(messages), asked_scale(messages))
    return None if number is None else str(number)


def _line(messages):
    """Returns the line after the last ####, or an empty text."""
    _, marker, field = conclusion(messages[-1]["content"]).rpartition("####")
    return field.strip().partition("\n")[0] if marker else ""
