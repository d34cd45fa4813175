"""A user without a home or a name, `~` in paths, and how OpenMP threads wait."""

from __future__ import annotations

import getpass
import os
import pwd
import stat
import tempfile
from pathlib import Path

import pytest

from runtime.startup import WAIT_POLICY, WAIT_VARIABLES, expand_home, home, prepare_process


@pytest.fixture
def unknown_user(monkeypatch, tmp_path) -> Path:
    """A user whom the system does not know; returns the temporary directory."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")  # put back after the test, whatever is set meanwhile
        monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.parametrize("relative", [None, "~", "some/folder"])
def test_without_a_home_there_is_a_private_folder(unknown_user, monkeypatch, relative):
    if relative is not None:
        monkeypatch.setenv("HOME", relative)
    prepare_process()
    assert os.environ["HOME"] == str(home()) == str(unknown_user / f"memcompiler-home-{os.getuid()}")
    assert stat.S_IMODE(home().stat().st_mode) == 0o700
    assert getpass.getuser() and Path("~/x").expanduser() == home() / "x" == Path(expand_home("~/x"))


@pytest.mark.parametrize("kind", ["open to others", "link", "file"])
def test_a_folder_that_others_could_have_made_is_not_used(unknown_user, tmp_path_factory, kind):
    taken = unknown_user / f"memcompiler-home-{os.getuid()}"
    if kind == "link":
        taken.symlink_to(tmp_path_factory.mktemp("theirs"))
    elif kind == "file":
        taken.touch(0o644)
    else:
        taken.mkdir()
        taken.chmod(0o777)
    assert home() != taken and stat.S_IMODE(home().stat().st_mode) == 0o700


def test_a_home_and_a_name_stay_as_they_are(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setenv(WAIT_POLICY, "ACTIVE")
    before = dict(os.environ)
    prepare_process()
    assert dict(os.environ) == before and home() == tmp_path


@pytest.mark.parametrize(
    ("path", "expanded"),
    [
        ("~", "/the/home"),
        ("~/", "/the/home/"),
        ("~/a b/ü", "/the/home/a b/ü"),
        (f"~{pwd.getpwuid(0)[0]}/x", None),
        ("", ""),
        ("a/~/b", "a/~/b"),
        ("./~x", "./~x"),
        ("org/name~1", "org/name~1"),
    ],
)
def test_home_is_expanded_where_a_path_begins_with_it(monkeypatch, path, expanded):
    monkeypatch.setenv("HOME", "/the/home")
    assert expand_home(path) == (f"{pwd.getpwuid(0)[5]}/x" if expanded is None else expanded)


@pytest.mark.parametrize("path", ["~no-such-user", "~no-such-user/x", "~x y/z", "~~"])
def test_an_unknown_user_is_an_error(path):
    with pytest.raises(ValueError, match="there is no user"):
        expand_home(path)


@pytest.mark.parametrize("given", [None, *WAIT_VARIABLES])
def test_threads_sleep_while_they_wait_unless_the_user_says_how(monkeypatch, given):
    for name in WAIT_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if given:
        monkeypatch.setenv(given, "200")
    prepare_process()
    assert {name: os.environ[name] for name in WAIT_VARIABLES if name in os.environ} == (
        {given: "200"} if given else {WAIT_POLICY: "PASSIVE"}
    )
