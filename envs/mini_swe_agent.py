r"""A program whose test fails, which mini-swe-agent mends: pip install 'mini-swe-agent>=2.4,<3'.

The agent (github.com/SWE-agent/mini-swe-agent) is unchanged. It asks the policy for one command of
the shell after another, which runs in a sandbox (docs/rewards.md), until a command prints the line
that ends the task. The prompts below are short; write your own into a copy of this file.

Row: {"messages": [...], "files": {"solution.py": "def add(a, b): ...", "test_solution.py": "..."},
"test_cases": "assert add(1, 2) == 3"}. The last message is the task. The files are in the folder of
the agent; the test cases are not, and judge what is in solution.py at the end. docs/rewards.md has
the forms of `test_cases`. This file writes rows with small functions:

    python envs/mini_swe_agent.py 1000 train.jsonl

A reply without exactly one command is not in the next request: the agent tells only what was wrong,
and rl2 trains what follows as another sequence. One step on a CPU, with a small model in the folder
MODEL:

    python -m rl2.trainer.ppo rollout.env_path=mini_swe_agent actor.model_name=MODEL \
        data.path=examples/rows/mini_swe_agent.jsonl trainer.max_steps=1 rollout.max_turns=4 \
        data.prompts_per_rollout=3 data.responses_per_prompt=2 \
        rollout.train_sampling_params.max_new_tokens=64
"""

import argparse
import contextlib
import importlib.util
import json
import os
import random

from rl2.rewards import code, sandbox
from rl2.rewards.workspace import Workspace, shorten

# Of the agent and of litellm, its client. Without them an import looks for prices on the internet,
# and a request that the endpoint refuses is repeated for minutes.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = "1"
os.environ["MSWEA_SILENT_STARTUP"] = "1"

if importlib.util.find_spec("minisweagent") is None:  # before a model loads
    raise ModuleNotFoundError("pip install 'mini-swe-agent>=2.4,<3'")

# "namespaces", "user" or "process": the run does not start on a machine where sandboxes are weaker.
REQUIRED_STRENGTH = "process"
LIMITS = sandbox.Limits(cpu_seconds=5, memory_bytes=2**30)  # of each command
MAX_CHARACTERS = 4000  # of what a command prints; the middle of more is left out

END = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # as all prompts of the agent have it
AGENT_PROMPT = f"""You mend programs. Each answer is one command of the shell, such as

```bash
cat solution.py
```

and the next message has what it prints. When the test passes, end with `echo {END}`."""
PROMPTS = {"system_template": AGENT_PROMPT, "instance_template": "{{task}}"}
FORM = {
    "action_regex": r"```bash\n(.*?)\n```",
    "format_error_template": "Write exactly one command in a ```bash block.",
    "observation_template": "{{output.output}}",
}

sandbox.require(REQUIRED_STRENGTH)


class Shell:
    """What mini-swe-agent calls an environment. Its commands run in a workspace."""

    def __init__(self, workspace):
        self.workspace = workspace
        self.config = {}

    def execute(self, action, cwd=""):
        """Returns what a command prints. The one that ends the task raises Submitted."""
        from minisweagent.exceptions import Submitted

        try:
            result = self.workspace.run(action["command"])
        except ValueError as error:  # it is too long
            return {"output": str(error), "returncode": 1, "exception_info": ""}
        text = (result.stdout + result.stderr).strip()
        has_succeeded = result.status == "succeeded"
        if has_succeeded and text.partition("\n")[0] == END:
            end = {"exit_status": "Submitted", "submission": ""}
            raise Submitted({"role": "exit", "content": "", "extra": end})
        text = shorten(text, MAX_CHARACTERS)
        if not has_succeeded or not text:
            text = f"{text}\n({result.status})".strip()
        return {"output": text, "returncode": int(not has_succeeded), "exception_info": ""}

    def get_template_vars(self):
        return {}

    def serialize(self):
        return {}


def run(row, base_url, model, api_key, state):
    import litellm
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    litellm.suppress_debug_info = True
    policy = LitellmTextbasedModel(
        model_name=f"openai/{model}",
        model_kwargs={"api_base": base_url, "api_key": api_key},
        cost_tracking="ignore_errors",
        **FORM,
    )
    with Workspace(row["files"], LIMITS) as workspace:
        try:
            DefaultAgent(policy, Shell(workspace), **PROMPTS).run(row["messages"][-1]["content"])
        finally:  # also when the agent has met the limit of turns
            with contextlib.suppress(OSError):  # the file has been removed
                state["program"] = workspace.read("solution.py")


def reward_fn(messages, state, test_cases):
    """1.0 if the program passes all tests."""
    program = state.get("program")
    return float(program is not None and code.judge(program, test_cases, LIMITS).is_right)


# Name, parameters, the right result and a wrong one.
FUNCTIONS = (
    ("add", "{x}, {y}", "{x} + {y}", "{x} - {y}"),
    ("subtract", "{x}, {y}", "{x} - {y}", "{x} + {y}"),
    ("multiply", "{x}, {y}", "{x} * {y}", "{x} + {y}"),
    ("larger", "{x}, {y}", "max({x}, {y})", "min({x}, {y})"),
    ("smaller", "{x}, {y}", "min({x}, {y})", "max({x}, {y})"),
    ("distance", "{x}, {y}", "abs({x} - {y})", "abs({x} + {y})"),
    ("mean", "{x}, {y}", "({x} + {y}) / 2", "{x} + {y} / 2"),
    ("is_equal", "{x}, {y}", "{x} == {y}", "{x} != {y}"),
    ("square", "{x}", "{x} ** 2", "{x} * 2"),
    ("double", "{x}", "{x} * 2", "{x} ** 2"),
    ("is_even", "{x}", "{x} % 2 == 0", "{x} % 2 == 1"),
    ("is_odd", "{x}", "{x} % 2 == 1", "{x} % 2 == 0"),
    ("add_{n}", "{x}", "{x} + {n}", "{x} - {n}"),
    ("subtract_{n}", "{x}", "{x} - {n}", "{x} + {n}"),
    ("times_{n}", "{x}", "{x} * {n}", "{x} + {n}"),
    ("is_above_{n}", "{x}", "{x} > {n}", "{x} < {n}"),
    ("is_below_{n}", "{x}", "{x} < {n}", "{x} > {n}"),
)
LETTERS = "abcdhkmnpqrstuvwxyz"
NUM_TESTS = 5
TASK = "python test_solution.py fails. Mend solution.py."


def make_row(generator):
    """Returns a function with a mistake, a test that fails, and more tests of all it should do."""
    x, y = generator.sample(LETTERS, 2)
    n = generator.randint(2, 30)
    function = generator.choice(FUNCTIONS)
    name, parameters, right, wrong = (part.format(x=x, y=y, n=n) for part in function)
    is_right, is_wrong = (eval(f"lambda {parameters}: {result}") for result in (right, wrong))
    failing, tests = [], []
    while not failing or len(tests) < NUM_TESTS:
        values = [generator.randint(0, 40) for _ in parameters.split(",")]
        test = f"assert {name}({', '.join(map(str, values))}) == {is_right(*values)}"
        tests.append(test)
        if is_right(*values) != is_wrong(*values):
            failing.append(test)
    return {
        "messages": [{"role": "user", "content": TASK}],
        "files": {
            "solution.py": f"def {name}({parameters}):\n    return {wrong}\n",
            "test_solution.py": f"from solution import {name}\n\n{failing[0]}\n",
        },
        "test_cases": "\n".join(tests),
        "right": right,
        "wrong": wrong,
    }


def main():
    parser = argparse.ArgumentParser(description="Writes small functions with a mistake.")
    parser.add_argument("count", type=int)
    parser.add_argument("file", help="JSON lines")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    with open(arguments.file, "w", encoding="utf-8") as file:
        for _ in range(arguments.count):
            file.write(json.dumps(make_row(generator)) + "\n")


if __name__ == "__main__":
    main()
