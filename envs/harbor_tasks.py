r"""Tasks of Harbor (harborframework.com, the framework of terminal-bench), in containers of Docker.

The folder of a task has task.toml, instruction.md, environment/Dockerfile and tests/test.sh. Only
this format is used; Harbor itself, which needs Python 3.12, is not. Needs the command docker.

Row: {"messages": [...], "task": "examples/rows/harbor_tasks/greeting"}. This file writes the rows
of all tasks in a folder, and names those that need what it does not have:

    python envs/harbor_tasks.py TASKS train.jsonl

Each trajectory has a container of its own, built or pulled at its first use, in which the model
runs commands with the tool `shell`. When it has ended, the tests are copied into the container and
run there. The reward is what they write to /logs/verifier/reward.txt, or the parts in reward.json;
0.0 if they write none. As in Harbor, processes of the model may still run beside the tests.

rollout.env_timeout must be longer than a build, and longer than the timeout_sec of [verifier]. That
of [agent] is not used: rollout.max_turns and COMMAND_SECONDS limit the model. There are as many
containers as trajectories at a time. Those of a run that was killed stay; `docker ps --filter
label=rl2` lists them. One step on a CPU, with a small model that knows tools in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=harbor_tasks actor.model_name=MODEL \
        data.path=examples/rows/harbor_tasks.jsonl trainer.max_steps=1 rollout.max_turns=6 \
        data.prompts_per_rollout=3 data.responses_per_prompt=2 rollout.env_timeout=1200 \
        rollout.train_sampling_params.max_new_tokens=64
"""

import argparse
import contextlib
import functools
import json
import os
import re
import subprocess
import tempfile
import threading
import tomllib
import uuid
from pathlib import Path

from rl2.rewards.workspace import shorten

COMMAND_SECONDS = 120  # of each command of the model
GRACE_SECONDS = 15  # in which docker itself must answer beyond that
MAX_CHARACTERS = 4000  # of what a command prints; the middle of more is left out
MAX_BYTES = 2**18  # after which a command that prints is ended
# $1 is the time limit and $2 the command. Both are ended in the container, not only the client.
SHELL = f'set -o pipefail; timeout -k 5 "$1" bash -c "$2" 2>&1 </dev/null | head -c {MAX_BYTES}'
LOGS, TESTS = "/logs/verifier", "/tests"
# Keys of task.toml that other tasks need, with a value that this file would ignore.
UNSUPPORTED = {
    "steps": "several steps",
    "environment.gpus": "GPUs",
    "environment.tpu": "a TPU",
    "environment.mcp_servers": "MCP servers",
    "environment.healthcheck": "a health check",
    "verifier.environment": "a container of its own for the tests",
    "verifier.collect": "commands before the tests",
}
BUILD_LOCK = threading.Lock()


def docker(*arguments, timeout=None):
    """Returns what docker prints. RuntimeError with its error if it fails."""
    done = subprocess.run(
        ["docker", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"docker {arguments[0]}: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()


try:  # before a model loads
    docker("version", "--format", "{{.Server.Version}}", timeout=60)
except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
    raise RuntimeError(
        f"harbor_tasks needs Docker, which does not answer: start it, or its daemon ({error})"
    ) from error


class Task:
    """A folder with a task. ValueError if it needs what this file does not have."""

    def __init__(self, folder):
        self.folder = Path(folder).resolve()
        path = self.folder / "task.toml"
        try:
            self.config = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        self.environment = self.config.get("environment", {})
        self.verifier = self.config.get("verifier", {})
        needs = list(self.find_unsupported())
        if needs:
            raise ValueError(f"{self.folder}: harbor_tasks does not have {', '.join(needs)}")

    def find_unsupported(self):
        for key, what in UNSUPPORTED.items():
            section = self.config
            for name in key.split("."):
                section = section.get(name) or {}
            if section:
                yield what
        if self.verifier.get("environment_mode", "shared") != "shared":
            yield UNSUPPORTED["verifier.environment"]
        if self.environment.get("os", "linux").lower() != "linux":
            yield "containers of Windows"
        modes = [self.config.get(name, {}).get("network_mode") for name in ("agent", "verifier")]
        if any(modes) or self.environment.get("network_mode") == "allowlist":
            yield "lists of allowed hosts, or a network for a part of the time"
        if list(self.folder.glob("environment/docker-compose.y*ml")):
            yield "Docker Compose"
        if not (self.folder / "tests/test.sh").is_file():
            yield "another test than tests/test.sh"

    def start(self, name):
        """Starts a container of the task."""
        image = self.environment.get("docker_image") or build(self.folder / "environment")
        options = []
        if "cpus" in self.environment:
            options += ["--cpus", str(self.environment["cpus"])]
        memory = self.environment.get("memory") or self.environment.get("memory_mb")
        if memory:
            options += ["--memory", memory if isinstance(memory, str) else f"{memory}m"]
        is_closed = self.environment.get("network_mode") == "no-network"
        if is_closed or self.environment.get("allow_internet") is False:
            options += ["--network", "none"]
        options += variables(self.environment.get("env", {}))
        options += ["--detach", "--rm", "--label", "rl2", "--name", name]
        docker("run", *options, image, "sh", "-c", "sleep infinity")


@functools.cache
def build_once(folder):
    return docker("build", "--quiet", str(folder))


def build(folder):
    """Returns the image of a Dockerfile, which is built once."""
    with BUILD_LOCK:  # docker would build it for all trajectories at once
        return build_once(folder)


def variables(values):
    """The options of docker for environment variables, some of which are those of this process."""
    options = []
    for name, value in values.items():
        match = re.fullmatch(r"\$\{(\w+)(?::-(.*))?\}", value)
        if match:
            value = os.environ.get(match[1], match[2])
            if value is None:
                raise ValueError(f"the task needs the environment variable {match[1]}")
        options += ["--env", f"{name}={value}"]
    return options


class make_env:
    """A container, and commands in it."""

    def __init__(self):
        self.container = None

    def reset(self, task, **row):
        self.task = Task(task)
        self.container = f"rl2-{uuid.uuid4().hex}"  # known before it runs, so that it will end
        self.task.start(self.container)

    def shell(self, command: str):
        """Runs a command of bash in the container and returns what it prints.

        Args:
            command: a line for the shell, such as ls -l
        """
        try:
            user = self.task.config.get("agent", {}).get("user")
            output, status = self._execute(command, COMMAND_SECONDS, self._options(user))
        except subprocess.TimeoutExpired:
            return f"(it still runs after {COMMAND_SECONDS} s)"
        text = shorten(output, MAX_CHARACTERS)
        return text if status == 0 else f"{text}\n(status {status})"

    def _execute(self, command, seconds, options):
        """Returns (what the command prints, its status). TimeoutExpired if docker hangs with it."""
        done = subprocess.run(
            ["docker", "exec", *options, self.container, "bash", "-c", SHELL, "bash"]
            + [str(seconds), command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds + GRACE_SECONDS,
        )
        return done.stdout.strip(), done.returncode

    def _options(self, user=None, values=None):
        """The options of `docker exec` for a user, in the working directory of the task."""
        options = variables(values or {})
        if user is not None:
            options += ["--user", str(user)]
        if "workdir" in self.task.environment:
            options += ["--workdir", self.task.environment["workdir"]]
        return options

    def reward(self):
        """What the tests write as reward: a number, or its parts. 0.0 if they do not."""
        # The model may have removed the working directory, in which no command starts then.
        verifier, root = self.task.verifier, ["--user", "root", "--workdir", "/"]
        seconds = verifier.get("timeout_sec", 600)
        try:
            # Whatever the model has put there is not the tests' own.
            prepare = f"rm -rf {LOGS} {TESTS} && mkdir -p {LOGS} {TESTS} && chmod 777 {LOGS}"
            _, status = self._execute(prepare, COMMAND_SECONDS, root)
            if status:
                return 0.0
            docker("cp", f"{self.task.folder}/tests/.", f"{self.container}:{TESTS}", timeout=600)
            self._execute(f"chmod +x {TESTS}/test.sh", COMMAND_SECONDS, root)
            options = self._options(verifier.get("user"), verifier.get("env"))
            self._execute(f"{TESTS}/test.sh > {LOGS}/test-stdout.txt", seconds, options)
            return self._read_reward()
        except (RuntimeError, subprocess.TimeoutExpired):  # the model has broken its container
            return 0.0

    def _read_reward(self):
        """What is in reward.json or else in reward.txt; 0.0 without a number."""
        with tempfile.TemporaryDirectory() as folder:
            for name in ("reward.json", "reward.txt"):
                path = Path(folder, name)
                with contextlib.suppress(RuntimeError):  # there is no such file
                    docker("cp", f"{self.container}:{LOGS}/{name}", str(path), timeout=60)
                if path.is_file() and not path.is_symlink():
                    return read_parts(path.read_text(encoding="utf-8", errors="replace"))
        return 0.0

    def close(self):
        if self.container is not None:
            with contextlib.suppress(RuntimeError):  # it has not started, or has ended
                docker("rm", "--force", self.container, timeout=120)


def read_parts(text):
    """A number, or a dict of numbers, of JSON; 0.0 for anything else."""
    try:
        reward = json.loads(text)
        if isinstance(reward, dict):
            return {name: float(value) for name, value in reward.items()}
        return float(reward)
    except (TypeError, ValueError):
        return 0.0


def main():
    parser = argparse.ArgumentParser(description="Writes the rows of a folder of Harbor's tasks.")
    parser.add_argument("tasks", type=Path, help="a folder with a folder for each task")
    parser.add_argument("file", help="JSON lines")
    arguments = parser.parse_args()
    paths = sorted(arguments.tasks.glob("*/task.toml"))
    if not paths:
        parser.error(f"{arguments.tasks} has no folder with a task.toml")
    with open(arguments.file, "w", encoding="utf-8") as file:
        for path in paths:
            try:
                Task(path.parent)
            except ValueError as error:
                print(f"left out: {error}")
                continue
            text = (path.parent / "instruction.md").read_text(encoding="utf-8").strip()
            row = {"messages": [{"role": "user", "content": text}], "task": str(path.parent)}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
