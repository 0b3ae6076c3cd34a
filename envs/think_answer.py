r"""Questions that the model thinks about first: <think>...</think> <answer>...</answer>.

Row: {"messages": [...], "answer": "Paris"}. The answer is a text or a number: 4.0 and 4 are equal,
and so are texts apart from capitals and spacing. Conversations without a system message get one
that asks for the form.

One step on a CPU, with a small model in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=think_answer actor.model_name=MODEL \
        data.path=examples/rows/think_answer.jsonl trainer.max_steps=1 data.prompts_per_rollout=3 \
        data.responses_per_prompt=2 rollout.train_sampling_params.max_new_tokens=32
"""

from rl2.rewards.numbers import number
from rl2.rewards.text import THINK_ANSWER_PROMPT, is_think_answer, last_tagged, same_text

SYSTEM_PROMPT = THINK_ANSWER_PROMPT


def reward_fn(messages, answer):
    """Two reward parts.

    right: 1.0 if the last <answer></answer> after the thought holds the answer, else 0.0.
    format: 0.1 if the whole reply has the form, each tag once, else 0.0.
    """
    reply = messages[-1]["content"]
    field, answer = last_tagged(reply), str(answer)
    is_number = number(answer) is not None
    is_right = number(field) == number(answer) if is_number else same_text(field, answer)
    return {"right": float(is_right), "format": 0.1 * is_think_answer(reply)}
