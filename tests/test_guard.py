"""The guard: nothing outlives its starter, whoever stops what, and in which order."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra import guard

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (sys.executable, "-I", "-S", "-c")
Guard = Callable[..., "subprocess.Popen[bytes]"]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux adopts orphans")

# What the commands below share: they note who they are in a file named by their part.
NOTING = """
import os, signal, subprocess, sys, time
def note(name, text):
    with open(name + ".partial", "w") as file:
        file.write(str(text))
    os.rename(name + ".partial", name)
"""
SLEEPER = NOTING + "note('command', os.getpid())\ntime.sleep(100)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
# A grandchild in a session of its own, whose parent is gone.
DAEMON = """
if not os.fork():
    os.setsid()
    if not os.fork():
        {life}
        note('orphan', os.getpid())
        time.sleep(100)
    os._exit(0)
os.wait()
while not os.path.exists('orphan'):
    time.sleep(0.01)
"""


def until(claim: Callable[[], object], *, seconds: float = 20) -> None:
    """Return as soon as the claim holds; fail if it does not come to that."""
    limit = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < limit, "it did not come to that"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Say whether the process runs; one that is dead and merely not reaped does not."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()[:1] not in ("", "Z")


def pid_in(path: Path) -> int:
    until(path.exists)
    return int(path.read_text())


def run(command: list[str], *, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the guard's command line to its end, with a lifeline that holds until then."""
    lifeline, kept = os.pipe()
    try:
        return subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=lifeline,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        os.close(lifeline)
        os.close(kept)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Guard]:
    started: list[subprocess.Popen[bytes]] = []

    def start(source: str, grace_seconds: float = 20) -> subprocess.Popen[bytes]:
        own = [sys.executable, "-I", "-S", guard.__file__, "--grace", str(grace_seconds)]
        process = subprocess.Popen(
            [*own, "--", *PYTHON, source],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:  # cuts the lifeline, and waits
            pass


def end(process: subprocess.Popen[bytes]) -> int:
    """Cut the lifeline, and return the guard's exit status."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(60)


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 128 + 9),
    ],
)
def test_the_status_of_the_command_is_passed_on(start: Guard, source: str, status: int) -> None:
    assert start(source).wait(60) == status


def test_a_command_does_not_inherit_that_python_ignores_a_broken_pipe() -> None:
    done = run(["-m", "infra.guard", "--", "sh", "-c", "kill -s PIPE $$"])
    assert done.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--", "no-such-program"], 127, "must be a program that runs, got 'no-such-program'"),
        ([], 2, "a command must follow `--`, got none"),
        (["--grace", "-1", "--", "true"], 2, "must be a number of seconds >= 0, got '-1'"),
        (["--grace", "nan", "--", "true"], 2, "must be a number of seconds >= 0, got 'nan'"),
        (["--gracious", "1", "--", "true"], 2, "must be --grace SECONDS, got '--gracious 1'"),
    ],
)
def test_what_cannot_be_run_is_named(arguments: list[str], status: int, message: str) -> None:
    done = run(["-m", "infra.guard", *arguments])
    assert done.returncode == status
    assert message in done.stderr


def test_the_guard_starts_in_a_tenth_of_a_second() -> None:
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(["-I", "-S", guard.__file__, "--", "true"]).check_returncode()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.1


def test_a_command_ends_with_its_starter_even_if_that_is_killed(tmp_path: Path) -> None:
    source = (
        "import subprocess, sys, time\n"
        f"command = [{sys.executable!r}, '-m', 'infra.guard', '--', *{PYTHON!r}, {SLEEPER!r}]\n"
        f"guard = subprocess.Popen(command, stdin=subprocess.PIPE, cwd={str(tmp_path)!r},\n"
        f"                         env={{'PYTHONPATH': {str(ROOT)!r}}})\n"
        "print(guard.pid, flush=True)\n"
        "time.sleep(100)"
    )
    with subprocess.Popen([*PYTHON, source], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        guard_pid = int(starter.stdout.readline())
        command_pid = pid_in(tmp_path / "command")
        assert is_running(guard_pid)
        assert is_running(command_pid)
        starter.kill()
    until(lambda: not is_running(command_pid) and not is_running(guard_pid))


def test_only_the_end_of_the_lifeline_counts_not_what_comes_through_it(
    start: Guard, tmp_path: Path
) -> None:
    process = start(SLEEPER)
    command_pid = pid_in(tmp_path / "command")
    assert process.stdin is not None
    process.stdin.write(b"anything")
    process.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    assert is_running(command_pid)
    assert end(process) == 128 + signal.SIGTERM


def test_a_stop_right_after_the_start_is_not_lost(start: Guard) -> None:
    for _ in range(10):
        begun = time.monotonic()
        assert end(start("import time; time.sleep(100)")) == 128 + signal.SIGTERM
        assert time.monotonic() - begun < 15


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_guards_group_reaches_the_command_once_and_as_sigterm(
    start: Guard, tmp_path: Path, number: signal.Signals
) -> None:
    source = f"""{NOTING}
seen = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: seen.append(number))
note('command', os.getpid())
while not os.path.exists('enough'):
    time.sleep(0.01)
note('seen', seen)
"""
    process = start(source)
    pid_in(tmp_path / "command")
    for _ in range(3):
        os.killpg(process.pid, number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
    (tmp_path / "enough").touch()
    assert process.wait(60) == 0
    assert (tmp_path / "seen").read_text() == str([int(signal.SIGTERM)])


def test_a_command_stops_its_own_children_in_its_own_order(start: Guard, tmp_path: Path) -> None:
    child = NOTING + (
        "signal.signal(signal.SIGTERM, lambda *_: (note('child-ended', time.monotonic()), os._exit(0)))\n"
        "note('child', os.getpid())\ntime.sleep(100)"
    )
    source = f"""{NOTING}
child = subprocess.Popen([*{PYTHON!r}, {child!r}])
def stop(*_):
    try:
        child.wait(0.3)
    except subprocess.TimeoutExpired:
        note('command-stopped', time.monotonic())
        child.terminate()
    child.wait()
    os._exit(5)
signal.signal(signal.SIGTERM, stop)
note('command', os.getpid())
time.sleep(100)
"""
    process = start(source)
    child_pid = pid_in(tmp_path / "child")
    pid_in(tmp_path / "command")
    assert end(process) == 5
    assert float((tmp_path / "command-stopped").read_text()) < float(
        (tmp_path / "child-ended").read_text()
    )
    assert not is_running(child_pid)


@linux_only
def test_what_does_not_end_in_the_grace_is_killed_also_in_another_session(
    start: Guard, tmp_path: Path
) -> None:
    source = (
        NOTING
        + STUBBORN
        + DAEMON.format(life="pass")
        + "note('command', os.getpid())\ntime.sleep(100)"
    )
    process = start(source, grace_seconds=0.5)
    pids = [pid_in(tmp_path / name) for name in ("command", "orphan")]
    begun = time.monotonic()
    assert end(process) == 128 + signal.SIGKILL
    assert time.monotonic() - begun > 0.5
    assert not any(is_running(pid) for pid in pids)
    assert process.stderr is not None
    assert b"killing what is left after 0.5 s" in process.stderr.read()


@linux_only
def test_what_a_command_leaves_behind_is_asked_to_end_as_it_would_have_been(
    start: Guard, tmp_path: Path
) -> None:
    life = "signal.signal(signal.SIGTERM, lambda *_: (note('asked', 1), os._exit(0)))"
    process = start(NOTING + DAEMON.format(life=life) + "os._exit(3)")
    assert process.wait(60) == 3
    assert (tmp_path / "asked").exists()
    assert not is_running(pid_in(tmp_path / "orphan"))


@linux_only
def test_a_deep_family_is_killed_generation_after_generation(start: Guard, tmp_path: Path) -> None:
    source = f"""{NOTING}{STUBBORN}
for depth in range(6):
    if os.fork():
        break
    os.setsid()
else:
    depth = 6
note(f'generation-{{depth}}', os.getpid())
time.sleep(100)
"""
    process = start(source, grace_seconds=0)
    pids = [pid_in(tmp_path / f"generation-{depth}") for depth in range(7)]
    assert end(process) == 128 + signal.SIGKILL
    assert not any(is_running(pid) for pid in pids)


@linux_only
def test_a_command_is_asked_to_end_also_when_its_guard_is_killed(
    start: Guard, tmp_path: Path
) -> None:
    process = start(SLEEPER)
    command_pid = pid_in(tmp_path / "command")
    process.kill()
    until(lambda: not is_running(command_pid))


@linux_only
def test_a_command_has_no_input_and_holds_nothing_that_its_guard_was_handed(tmp_path: Path) -> None:
    source = "import os; print(os.read(0, 1), len(os.listdir('/proc/self/fd')) - 1)"
    with (tmp_path / "lock").open("w") as handed:
        process = subprocess.Popen(
            [sys.executable, "-m", "infra.guard", "--", *PYTHON, source],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[handed.fileno()],
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.read() == b"b'' 3\n"


def test_without_adoption_the_commands_group_is_cleared(tmp_path: Path) -> None:
    source = f"""{NOTING}
if not os.fork():
    {STUBBORN}
    note('orphan', os.getpid())
    time.sleep(100)
while not os.path.exists('orphan'):
    time.sleep(0.01)
os._exit(4)
"""
    guarding = (
        f"import sys; from infra.guard import guard; "
        f"sys.exit(guard([*{PYTHON!r}, {source!r}], grace_seconds=0.3, adopts=False))"
    )
    done = run(["-c", guarding], folder=tmp_path)
    assert done.returncode == 4
    assert "killing what is left after 0.3 s: process group" in done.stderr
    assert not is_running(pid_in(tmp_path / "orphan"))
