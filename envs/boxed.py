r"""Mathematics whose answer is in \boxed{}.

Row: {"messages": [...], "answer": "\\frac{\\pi}{2}"}. The answer is LaTeX.

The package math-verify compares the answers, so 2x + 1 is 1 + 2x. Conversations without a system
message get one that asks for the box. Where the rows' own text asks for it already,
data.system_prompt= leaves that out.

One step on a CPU, with a small model in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=boxed data.path=examples/rows/boxed.jsonl \
        actor.model_name=MODEL trainer.max_steps=1 data.prompts_per_rollout=3 \
        data.responses_per_prompt=2 rollout.train_sampling_params.max_new_tokens=32
"""

from rl2.rewards.maths import asked_scale, is_other_unit, same_maths
from rl2.rewards.text import BOXED_PROMPT, last_boxed

SYSTEM_PROMPT = BOXED_PROMPT


def reward_fn(messages, answer):
    r"""1.0 if the last \boxed{} of the reply holds the answer and nothing else, else 0.0."""
    field = last_boxed(messages[-1]["content"])
    is_right = same_maths(field, str(answer), asked=asked_scale(messages))
    return float(is_right and not (r"\text" in field and is_other_unit(field, messages)))
