r"""An environment of two turns: replies in capital letters. Row: {"messages": [...]}.

    python -m rl2.trainer.ppo actor.model_name=MODEL \
        data.path=examples/rows/arithmetic.jsonl data.prompts_per_rollout=3 \
        rollout.env_path=examples/plugins/environment.py rollout.max_turns=2

docs/environments.md lists what the functions may ask for by the names of their parameters.
"""

Message = dict[str, str]


def reward_fn(messages: list[Message]) -> float:
    """The fraction of the last reply's letters that are capital."""
    letters = [letter for letter in messages[-1]["content"] if letter.isalpha()]
    return sum(letter.isupper() for letter in letters) / max(1, len(letters))


def interact(messages: list[Message]) -> list[Message]:
    """Answers a reply if rollout.max_turns allows another. An empty list ends the trajectory."""
    if reward_fn(messages) == 1:
        return []
    return [{"role": "user", "content": "Louder, please."}]
