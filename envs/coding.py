r"""Programs in Python that must pass tests. They run in sandboxes; docs/rewards.md has more.

Row: {"messages": [...], "test_cases": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}. The program
reads an input and prints the output. With "fn_name": "add" beside them, an input has the arguments
of that function in JSON, one a line, and an output has the result; or both are as in APPS and TACO,
whose rows need data.columns.question=prompt data.columns.input_output=test_cases. `test_cases` may
also be Python tests, such as "assert add(1, 2) == 3", in a text or a list of texts.

Conversations without a system message get SYSTEM_PROMPT, which asks for a block of Python. Where
the rows' own text asks for it already, data.system_prompt= leaves that out.

One step on a CPU, with a small model in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=coding data.path=examples/rows/coding.jsonl \
        actor.model_name=MODEL trainer.max_steps=1 data.prompts_per_rollout=3 \
        data.responses_per_prompt=2 rollout.train_sampling_params.max_new_tokens=32
"""

from rl2.rewards import code, sandbox

SYSTEM_PROMPT = (
    "You solve programming tasks in Python. Think about the task first. Then write the whole "
    "program, with its imports, into one ```python block at the end of your reply."
)
# "namespaces", "user" or "process": the run does not start on a machine where sandboxes are weaker.
REQUIRED_STRENGTH = "process"
LIMITS = sandbox.Limits(cpu_seconds=5, memory_bytes=2**30)  # of each run of a program

sandbox.require(REQUIRED_STRENGTH)


def reward_fn(messages, test_cases):
    """Two reward parts for the last code block of the reply.

    right: 1.0 if the program passes all tests, else 0.0.
    format: 0.1 if there is a code block, else 0.0.
    """
    program = code.extract(messages[-1]["content"])
    if program is None:
        return {"right": 0.0, "format": 0.0}
    return {"right": float(code.judge(program, test_cases, LIMITS).is_right), "format": 0.1}
