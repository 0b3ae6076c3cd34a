r"""A Python program with a mistake, which the model finds and mends with a shell.

Row: {"messages": [...], "files": {"solution.py": "def add(a, b): ...", "README": "..."},
"test_cases": ["assert add(1, 2) == 3"]}. The files are in the folder of the shell; the tests are
not, and judge what is in solution.py at the end. docs/rewards.md has the forms of `test_cases`.

The prompt should say what is wrong, and that there is a tool: "add(1, 2) gives -1. Mend
solution.py." Commands run in sandboxes (docs/rewards.md), each with the limits below.

One step on a CPU, with a small model that knows tools in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=repair data.path=examples/rows/repair.jsonl \
        actor.model_name=MODEL trainer.max_steps=1 rollout.max_turns=4 \
        data.prompts_per_rollout=3 data.responses_per_prompt=2 \
        rollout.train_sampling_params.max_new_tokens=64
"""

from rl2.rewards import code, sandbox
from rl2.rewards.workspace import Workspace, shorten

# "namespaces", "user" or "process": the run does not start on a machine where sandboxes are weaker.
REQUIRED_STRENGTH = "process"
LIMITS = sandbox.Limits(cpu_seconds=5, memory_bytes=2**30)  # of each command
MAX_CHARACTERS = 4000  # of what a command prints; the middle of more is left out

sandbox.require(REQUIRED_STRENGTH)


class make_env:
    def __init__(self):
        self.workspace = None

    def reset(self, files, test_cases, **row):
        self.test_cases = test_cases
        self.workspace = Workspace(files, LIMITS)

    def shell(self, command: str):
        """Runs a command in the folder of the program.

        Args:
            command: a line for the shell, such as cat solution.py
        """
        result = self.workspace.run(command)
        text = shorten(result.stdout + result.stderr, MAX_CHARACTERS)
        return text if result.status == "succeeded" else f"{text}\n({result.status})"

    def reward(self):
        """1.0 if the program passes all tests."""
        try:
            program = self.workspace.read("solution.py")
        except OSError:  # the model has removed it, or filled the folder
            return 0.0
        return float(code.judge(program, self.test_cases, LIMITS).is_right)

    def close(self):
        if self.workspace is not None:
            self.workspace.close()
