"""Programs that attack their sandbox get what they deserve, leave nothing behind, and the next
program is judged as if they had not been."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from common import read_cases
from env_helpers import wait_until

from rl2.rewards import sandbox
from rl2.rewards.sandbox import Limits, Program, run

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="sandboxes need Linux")
# As root, a program of strength "process" may do all that root may, so no attack is tried in it.
CASES = read_cases("sandbox")
TESTED = ["namespaces", "user"] if os.geteuid() == 0 else ["namespaces"]
PYTHON = sys.executable
QUICK = Limits(cpu_seconds=1, wall_seconds=2, memory_bytes=2**28, file_bytes=2**16)


@cache
def find_python(strength):
    """A Python that programs of this strength can run, or None.

    That of the tests may be in a folder that only root may enter, such as /root.
    """
    for python in (PYTHON, "/usr/bin/python3"):
        with mock.patch.object(sys, "executable", python):
            if sandbox.works(strength):
                return python
    return None


@pytest.fixture(params=TESTED)
def strength(request, monkeypatch):
    python = find_python(request.param)
    if python is None:
        pytest.skip(f"sandboxes of strength {request.param!r} do not work on this machine")
    monkeypatch.setattr(sys, "executable", python)
    return request.param


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path_factory):
    """The folder of the sandboxes. Their processes have it in their command lines."""
    tmp_path_factory.getbasetemp()  # pytest makes its own folder first, outside of this one
    with tempfile.TemporaryDirectory() as name:  # other users cannot enter pytest's own folders
        os.chmod(name, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def find_processes(folder):
    """The processes that have `folder` in their command line, or run there, and are no zombies."""
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_zombie = path.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z"
            places = path.joinpath("cmdline").read_text() + os.readlink(path / "cwd")
            if str(folder) in places and not is_zombie:
                processes.append(path.name)
        except OSError:  # it has ended meanwhile
            continue
    return processes


def run_one(text, stdin=b"", limits=QUICK, **options):
    [result] = run(Program(textwrap.dedent(text), stdin), limits=limits, **options)
    return result


def check_nothing_is_left(folder, strength):
    wait_until(lambda: not find_processes(folder))  # they are killed; to die takes a core, too
    assert list(folder.glob("rl2-sandbox-*")) == []
    result = run_one("print(int(input()) + 1)", b"41", Limits(), strength=strength)
    assert result == ("succeeded", "42\n", "")


def test_fork_bombs_are_ended_beside_busy_processes(strength, folder):
    """Each session has an equal share of the cores, and the launcher is in that of the bombs."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command, start_new_session=True) for _ in range(12)]
    try:
        result = run_one(CASES["fork_bomb"], strength=strength)
        assert result.status in ("failed", "killed", "timed out", "starved")
        wait_until(lambda: not find_processes(folder))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    check_nothing_is_left(folder, strength)


def test_attacks_that_end_badly(strength, folder):
    """Side by side, so that they attack each other too."""
    attacks = CASES["bad_ends"]
    results = run(*map(Program, attacks.values()), limits=QUICK, strength=strength)
    for name, result in zip(attacks, results, strict=True):
        assert result.status in ("failed", "killed", "timed out", "starved"), name
        assert len(result.stdout) <= QUICK.file_bytes
    check_nothing_is_left(folder, strength)


def test_programs_that_leave_something_behind(strength, folder):
    """They may end as they like: nothing of theirs may be left, and nobody else is harmed."""
    for name, text in CASES["good_ends"].items():
        result = run_one(text, limits=Limits(), strength=strength)
        assert result.status == "succeeded", (name, result)
        check_nothing_is_left(folder, strength)


def test_a_program_writes_nothing_outside(strength, folder):
    victim = folder / "victim"
    victim.write_text("as it was")
    places = [str(victim), sandbox.launcher.__file__, os.path.realpath(sys.executable)]
    result = run_one(
        f"""
        for path in {places}:
            try:
                open(path, "a").write("broken")
            except OSError:
                continue
            print("it could write", path)
        open("own", "w").write("its own folder")
        """,
        limits=Limits(),
        strength=strength,
    )
    assert result == ("succeeded", "", "")
    assert victim.read_text() == "as it was"


def test_namespaces_hide_files_processes_and_network(folder, monkeypatch):
    if sandbox.best_strength() != "namespaces":
        pytest.skip("this machine makes no namespaces")
    secret = folder / "expected.json"
    secret.write_text("42")
    monkeypatch.setenv("SECRET", "42")
    address = f"\0{folder}"
    with socket.socket() as local, socket.socket(socket.AF_UNIX) as abstract:
        local.bind(("127.0.0.1", 0))
        local.listen()
        abstract.bind(address)
        abstract.listen()
        result = run_one(
            f"""
            import os, socket
            print(os.path.exists({str(secret)!r}), os.path.exists("/proc/1"))
            print(os.path.exists("/etc/passwd"), "SECRET" in os.environ)
            for family, address in [
                (socket.AF_INET, ("127.0.0.1", {local.getsockname()[1]})),
                (socket.AF_UNIX, {address!r}),
            ]:
                try:
                    socket.socket(family).connect(address)
                    print("connected")
                except OSError:
                    print("no connection")
            print(os.getpid() < 10, os.getuid() == 0)
            """,
            limits=Limits(),
        )
    expected = "False False\nFalse False\nno connection\nno connection\nTrue False\n"
    assert result.stdout == expected, result


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_programs_end_with_the_trainer(seconds, strength, folder):
    """However it ends: here it is killed while the launcher starts, and while the program runs."""
    code = (
        f"import sys; sys.executable = {sys.executable!r}; "
        "from rl2.rewards.sandbox import Limits, Program, run; "
        "run(Program('import time; time.sleep(1000)'), limits=Limits(wall_seconds=1000), "
        f"strength={strength!r})"
    )
    trainer = subprocess.Popen([PYTHON, "-c", code], env=os.environ | {"TMPDIR": str(folder)})
    try:
        wait_until(lambda: find_processes(f"{folder}/rl2-sandbox-"))
        time.sleep(seconds)
    finally:
        trainer.kill()
        trainer.wait()
    wait_until(lambda: not find_processes(folder))


def test_a_strength_that_the_machine_lacks_is_an_error(monkeypatch, capsys):
    monkeypatch.delenv(sandbox.INHERITED, raising=False)
    monkeypatch.setattr(sandbox, "best_strength", lambda: "user")
    sandbox.require("user")
    assert "strength 'user'" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="'namespaces' is required"):
        sandbox.require("namespaces")


def test_a_launcher_that_fails_is_no_fault_of_the_program(tmp_path, monkeypatch):
    broken = tmp_path / "launcher.py"
    broken.write_text("raise OSError('no namespace is left')")
    monkeypatch.setattr(sandbox.launcher, "__file__", str(broken))
    with pytest.raises(OSError, match="no namespace is left"):
        run_one("print()", strength="namespaces")


def test_programs_of_several_processes_share_the_cores():
    """One core, so one program at a time. The clock is that of the machine."""
    program = "import time; print(time.monotonic()); time.sleep(0.2); print(time.monotonic())"
    code = (
        "import os; from rl2.rewards.sandbox import Program, run; "
        "os.sched_setaffinity(0, [max(os.sched_getaffinity(0))]); "
        f"[result] = run(Program({program!r})); print(result.stdout)"
    )
    command = [PYTHON, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    times = [[float(x) for x in process.communicate()[0].split()] for process in processes]
    times.sort()
    assert all(end <= start for (_, end), (start, _) in zip(times, times[1:], strict=False)), times


def test_a_program_that_gets_no_core_is_told_from_one_that_sleeps():
    """Two processes want one core, until one of them has waited long enough."""
    script = """
        import os, signal, sys, time
        from rl2.rewards import launcher
        os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
        proc = os.open("/proc", os.O_RDONLY)

        def start(wait):
            child = os.fork()
            while child == 0:
                wait()
            return child

        busy = start(lambda: None)
        while launcher.waited(proc) < 0.5:
            pass
        os.kill(busy, signal.SIGKILL)
        os.waitpid(busy, 0)
        asleep = start(lambda: time.sleep(0.5))
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass
        print(launcher.waited(proc) < 0.5)
        os.kill(asleep, signal.SIGKILL)
        """
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not tell how long a process waits for a core")
    output = subprocess.check_output([PYTHON, "-c", textwrap.dedent(script)], text=True)
    assert output == "True\n"
