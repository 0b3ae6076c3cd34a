"""Commands of a workspace share its files and nothing else, and harm neither it nor others."""

import gc
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from common import read_cases
from env_helpers import wait_until
from test_sandbox import find_processes, folder, strength  # noqa: F401

from rl2.rewards import sandbox
from rl2.rewards.sandbox import Limits
from rl2.rewards.workspace import Workspace, shorten

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="sandboxes need Linux")
QUICK = Limits(cpu_seconds=2, wall_seconds=30, memory_bytes=2**28, file_bytes=2**20)


@pytest.fixture
def workspace(strength):  # noqa: F811
    # Data sets in columns give each row the files of all rows, those of others without content.
    files = {"a.txt": "one\n", "b.txt": None, "src/b.py": b"print(2)"}
    with Workspace(files, QUICK, strength) as workspace:
        yield workspace


def test_commands_share_files(workspace):
    assert workspace.run("ls").stdout == "a.txt\nsrc\n"
    assert workspace.run("cat a.txt; python3 src/b.py") == ("succeeded", "one\n2\n", "")
    assert workspace.run("echo two >> a.txt && mv src/b.py c.py").status == "succeeded"
    assert workspace.run(["cat", "a.txt"]) == ("succeeded", "one\ntwo\n", "")
    assert workspace.run("cat", stdin=b"given").stdout == "given"
    assert workspace.run("cd src; pwd").stdout.strip().endswith("src")
    assert not workspace.run("pwd").stdout.strip().endswith("src")
    assert workspace.run("touch ~/c && ls c").stdout == "c\n"


def test_the_middle_of_a_long_output_is_left_out():
    assert shorten("abcdefgh", 8) == "abcdefgh"
    assert shorten("abcdefghi", 8) == "abcd\n...\nfghi"


def test_files_are_read_and_written(workspace):
    workspace.write("new/deep/é.txt", "ü\n")
    assert workspace.read("new/deep/é.txt") == "ü\n" == workspace.run("cat new/deep/*").stdout
    workspace.write("a.txt", b"\xff")
    assert workspace.read("a.txt") == "\ufffd"
    for path in ("missing", "new"):
        with pytest.raises(FileNotFoundError, match=path):
            workspace.read(path)
    with pytest.raises(OSError, match="new"):
        workspace.write("new", "a folder")


def test_a_folder_is_copied(strength, folder):  # noqa: F811
    (folder / "project/tests").mkdir(parents=True)
    (folder / "project/run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "project/run.sh").chmod(0o755)
    (folder / "project/tests/link").symlink_to("../run.sh")
    with Workspace(folder / "project", QUICK, strength) as workspace:
        assert workspace.run("./run.sh; rm run.sh; ls tests").stdout == "ran\nlink\n"
    assert (folder / "project/run.sh").exists()


@pytest.mark.parametrize("path", ["../out", "/tmp/out", "a/../../out", "."])
def test_files_outside_are_refused(path, folder):  # noqa: F811
    with pytest.raises(ValueError, match="leads out"):
        Workspace({path: "x"})
    assert list(folder.iterdir()) == []


def test_how_a_command_ends_is_told(strength):  # noqa: F811
    ends = {"exit 3": "failed", "kill -9 $$": "killed", "sleep 100": "timed out"}
    limits = replace(QUICK, cpu_seconds=1, wall_seconds=3)
    with Workspace(limits=limits, strength=strength) as workspace:
        assert {command: workspace.run(command).status for command in ends} == ends
        endless = workspace.run("python3 -c 'while True: pass'")
        assert endless.status in ("killed", "starved")  # out of CPU time, or on a busy machine
        result = workspace.run(["no-such-command"])
        assert result.status == "failed" and "no-such-command" in result.stderr
        assert workspace.run("echo works").stdout == "works\n"


def test_the_next_command_works_after_attacks(workspace, folder):  # noqa: F811
    for name, attack in read_cases("sandbox")["attacks_of_a_workspace"].items():
        result = workspace.run(attack)
        assert len(result.stdout) <= QUICK.file_bytes
        after = workspace.run("ps >/dev/null 2>&1; rm -rf *; echo works")
        assert after == ("succeeded", "works\n", ""), name
    workspace.close()
    wait_until(lambda: not find_processes(folder))
    assert list(folder.glob("rl2-sandbox-*")) == []


def test_nothing_fills_the_disk(workspace, strength):  # noqa: F811
    if strength != "namespaces":
        pytest.skip("the folder is in memory with namespaces only")
    result = workspace.run("for i in $(seq 400); do head -c 1000000 /dev/zero > $i || exit 1; done")
    assert result.status == "failed" and "No space" in result.stderr
    assert workspace.run("rm -r * && echo works").stdout == "works\n"


def test_a_workspace_does_not_see_others(workspace, strength):  # noqa: F811
    with Workspace({"secret": "x"}, QUICK, strength) as other:
        home = other.run("pwd").stdout.strip()
        other.run("chmod 700 .")
        assert workspace.run(f"cat {home}/secret").status == "failed"
        assert other.read("secret") == "x"


def test_it_outlives_the_thread_that_made_it(strength):  # noqa: F811
    made = []
    thread = threading.Thread(target=lambda: made.append(Workspace({"a": "x"}, QUICK, strength)))
    thread.start()
    thread.join()
    with made.pop() as workspace:
        assert workspace.read("a") == "x"


def test_commands_of_several_threads_wait_for_each_other(workspace):
    script = "n=$(cat n 2>/dev/null || echo 0); sleep 0.1; echo $((n + 1)) > n"
    threads = [threading.Thread(target=workspace.run, args=(script,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert workspace.read("n") == "4\n"


def test_it_ends_with_its_last_reference(strength, folder):  # noqa: F811
    workspace = Workspace({"a": "x"}, QUICK, strength)
    assert workspace.read("a") == "x" and find_processes(folder)
    del workspace
    gc.collect()
    wait_until(lambda: not find_processes(folder))
    assert list(folder.glob("rl2-sandbox-*")) == []


def test_a_closed_workspace_says_so(workspace):
    workspace.close()
    workspace.close()
    with pytest.raises(OSError, match="has ended"):
        workspace.run("true")


def test_other_systems_are_told_what_is_missing(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    for use in (Workspace, lambda: sandbox.run(sandbox.Program("")), sandbox.best_strength):
        sandbox.best_strength.cache_clear()
        with pytest.raises(RuntimeError, match="need Linux, and this is darwin"):
            use()
    sandbox.best_strength.cache_clear()
