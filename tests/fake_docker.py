#!/usr/bin/env python3
"""Stands in for docker: a container is a folder of $FAKE_DOCKER, and its commands run there.

The folders /app, /tests and /logs are those of the container: their names are replaced in commands
and in files that are copied. It knows what envs/harbor_tasks.py uses.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_DOCKER"])
VALUES = ("--env", "--user", "--workdir", "--cpus", "--memory", "--network", "--name", "--label")


def read_options(words):
    """(the options that come first, the other words)."""
    options = []
    while words and words[0].startswith("--"):
        name = words.pop(0)
        options.append([name, words.pop(0)] if name in VALUES else [name])
    return options, words


def translate(text, container):
    return re.sub(r"(?<![\w./])/(app|tests|logs)\b", rf"{container}/\1", text)


def find_container(name):
    folder = STATE / name
    if not folder.is_dir():
        sys.exit(f"Error: No such container: {name}")
    return folder


def run(words):
    options, (image, *command) = read_options(words)
    assert command == ["sh", "-c", "sleep infinity"]
    folder = STATE / dict(each for each in options if len(each) == 2)["--name"]
    shutil.copytree(image, folder / "app", ignore=shutil.ignore_patterns("Dockerfile"))
    (STATE / "runs.jsonl").open("a").write(json.dumps(options) + "\n")
    print(folder.name)


def execute(words):
    options, (name, *command) = read_options(words)
    folder = find_container(name)
    environment = dict(value.split("=", 1) for key, value in options if key == "--env")
    command = [translate(word, folder) for word in command]
    place = next((value for key, value in options if key == "--workdir"), "/app")
    cwd = folder / place.lstrip("/")
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment})
    sys.exit(done.returncode)


def copy(source, target):
    if source.startswith("rl2-"):
        name, path = source.split(":")
        path = find_container(name) / path.lstrip("/")
        if not path.exists():
            sys.exit(f"Error: Could not find the file {path} in container {name}")
        shutil.copy(path, target)
        return
    name, path = target.split(":")
    folder = find_container(name)
    for file in Path(source).iterdir():
        text = translate(file.read_text(), folder)
        (folder / path.lstrip("/") / file.name).write_text(text)


def main():
    verb, *words = sys.argv[1:]
    if verb == "version":
        print("27.0")
    elif verb == "build":
        print(read_options(words)[1][0])
    elif verb == "run":
        run(words)
    elif verb == "exec":
        execute(words)
    elif verb == "cp":
        copy(*words)
    elif verb == "rm":
        shutil.rmtree(find_container(words[1]))
    else:
        sys.exit(f"docker: {verb!r} is not a docker command")


if __name__ == "__main__":
    main()
