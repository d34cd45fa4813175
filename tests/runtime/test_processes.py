"""Child processes that are started, watched and ended in one way."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.http import check_loopback, free_port, http_url, responds
from runtime.processes import ChildProcess, ProcessError, check_alive, terminate_all
from tests.waiting import until

ROOT = Path(__file__).parents[2]
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_child_ends_by_itself_with_its_status_and_its_last_words(tmp_path: Path) -> None:
    code = "import sys; print('x' * 5000); print('the end', file=sys.stderr); sys.exit(7)"
    for output in ("kept", tmp_path / "log"):
        with ChildProcess(python(code), output=output) as child:
            assert child.wait(20) == 7 and child.ending == "exit 7" and not child.reaped
            assert child.tail().endswith("the end") and len(child.tail()) <= 2000
        assert child.reaped and child.status == 7
        child.signal(signal.SIGKILL)  # reaches nobody


def test_what_does_not_listen_to_sigterm_is_killed_after_the_grace() -> None:
    children = [ChildProcess(python(STUBBORN), output="kept") for _ in range(2)]
    until(lambda: all(child.tail() == "up" for child in children))
    started = time.monotonic()
    terminate_all(children, grace_s=0.5)
    assert 0.5 <= time.monotonic() - started < 5
    assert [child.ending for child in children] == ["killed by SIGKILL"] * 2


def test_the_group_ends_with_the_child(tmp_path: Path) -> None:
    code = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]); print(p.pid, flush=True)"
    )
    with ChildProcess(python(code), output=tmp_path / "log") as child:
        assert child.wait(20) == 0
        until(lambda: "up" in child.tail())
        grandchild = int(child.tail().split()[0])
        assert lives(grandchild)
        child.kill()
        until(lambda: not lives(grandchild))


def test_readiness_is_waited_for_until_one_ends_or_the_time_is_over() -> None:
    with ChildProcess(python(STUBBORN), name="slow", output="kept") as slow:
        slow.wait_until_ready(lambda: slow.tail() == "up", 20)
        with pytest.raises(ProcessError, match=r"slow is not ready after 0.1 s; its last output:\nup"):
            slow.wait_until_ready(lambda: False, 0.1)
        with ChildProcess(python("print('why'); exit(3)"), name="dead", output="kept") as dead:
            with pytest.raises(ProcessError, match=r"dead ended \(3\); its last output:\nwhy"):
                slow.wait_until_ready(lambda: False, 20, [dead])
            with pytest.raises(ProcessError, match="dead ended"):
                check_alive([slow, dead])
        slow.kill()


def test_a_lifeline_ends_with_us() -> None:
    code = "import sys; print('up', flush=True); sys.stdin.read(); print('down', flush=True)"
    ours = (
        "import sys, time; from runtime.processes import ChildProcess; "
        f"ChildProcess([sys.executable, '-c', {code!r}], dies_with='lifeline'); time.sleep(60)"
    )
    with subprocess.Popen(python(ours), cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "up\n"
        parent.kill()
        assert parent.stdout.readline() == "down\n"


# -- in the foreground ------------------------------------------------------------------------------------------------


@pytest.fixture
def forwarding() -> Iterator[subprocess.Popen[str]]:
    """A parent of `run_in_foreground`, whose child says "up", and "down" when it is ended by SIGTERM."""
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: (print('down', flush=True), sys.exit(7))); "
        "print('up', flush=True); time.sleep(60)"
    )
    ours = (
        "import sys; from runtime.processes import run_in_foreground; "
        f"sys.exit(run_in_foreground([sys.executable, '-c', {code!r}]))"
    )
    with subprocess.Popen(python(ours), cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "up\n"
        yield parent
        parent.kill()


def test_signals_and_exit_status_pass_through(forwarding: subprocess.Popen[str]) -> None:
    forwarding.send_signal(signal.SIGTERM)
    assert forwarding.wait(60) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells the child")
def test_a_server_does_not_outlive_a_kill_of_its_parent(forwarding: subprocess.Popen[str]) -> None:
    forwarding.kill()
    assert forwarding.stdout is not None and forwarding.stdout.readline() == "down\n"


# -- addresses --------------------------------------------------------------------------------------------------------


def test_only_loopback_addresses_pass() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.3.0.9"):
        check_loopback(host)
    for host in ("0.0.0.0", "192.0.2.7", "::", "example.org"):
        with pytest.raises(ValueError, match="not loopback"):
            check_loopback(host)
    assert http_url("::1", 80) == "http://[::1]:80" and http_url("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert not responds(http_url("127.0.0.1", free_port()))
