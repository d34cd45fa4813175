"""Security: nothing is unpickled or run, what comes in is bounded, and ids never become paths."""

from __future__ import annotations

import ast
import base64
import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from agent.records import episode_from_json
from compiler.prompt import pictures_of
from configs.proxy import SessionsConfig
from memory.entry import MemoryEntry, Provenance
from proxy.mapping import _picture as picture_of_message
from proxy.sessions import SessionStore
from runtime.pictures import MAX_PIXELS, open_picture
from tests.fakes import one_step_episode

UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# Files that may, and why: what they read comes from another process of the same run.
MAY = {
    "runtime/ray_actors.py": "functions that a driver sends to the actors of its own Ray cluster",
    "training/ray_trainer.py": "the driver's side of it",
}
CALLS = {  # a call that reads or runs what it is given -> the argument that makes it safe
    "torch.load": "weights_only",
    "np.load": "",
    "numpy.load": "",
    "yaml.load": "",
    "yaml.unsafe_load": "",
    "yaml.full_load": "",
    "eval": "",
    "exec": "",
    "os.system": "",
    "os.popen": "",
}


def sources(repository: Path) -> Iterator[tuple[str, ast.Module]]:
    for package in sorted(repository.glob("*/__init__.py")):
        for path in sorted(package.parent.rglob("*.py")) if package.parent.name != "tests" else ():
            yield path.relative_to(repository).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> set[str]:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


def unsafe_calls(tree: ast.Module) -> Iterator[str]:
    """Yield calls of `CALLS` without their safe argument, and calls that ask for a shell or for others' code."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, given = ast.unparse(call.func), {word.arg: word.value for word in call.keywords}
        if name in CALLS and not (CALLS[name] in given and ast.unparse(given[CALLS[name]]) == "True"):
            yield f"{name}, line {call.lineno}"
        for word in {"shell", "trust_remote_code", "allow_pickle"} & given.keys():
            if ast.unparse(given[word]) != "False":
                yield f"{word}, line {call.lineno}"


def test_nothing_is_unpickled_and_no_text_is_run(repository: Path) -> None:
    trees = dict(sources(repository))
    unpickling = {path for path, tree in trees.items() if imported(tree) & UNPICKLES}
    assert unpickling == MAY.keys()
    assert not {path: found for path, tree in trees.items() if (found := list(unsafe_calls(tree)))}


@pytest.mark.parametrize(
    "code", ["torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)", "eval(x)", "run(c, shell=True)"]
)
def test_the_search_sees_an_unsafe_call(code: str) -> None:
    assert list(unsafe_calls(ast.parse(f"def f():\n    return {code}")))
    assert not list(unsafe_calls(ast.parse("torch.load(f, weights_only=True); model.eval(); run(c, shell=False)")))
    assert imported(ast.parse("def f():\n    import pickle as p\n    from dill import loads")) == {"pickle", "dill"}


# -- decompression ----------------------------------------------------------------------------------------------------


def bomb(side: int) -> bytes:
    """Make a PNG whose header promises side x side pixels, of a few hundred kilobytes."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = zlib.compress(bytes((side + 7) // 8 + 1) * side, 9)
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_picture_that_is_too_large_is_refused_wherever_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = bomb(4200)  # below the limit at which Pillow warns
    assert len(huge) < 2**15 and MAX_PIXELS < 4200**2 and open_picture(bomb(64)).size == (64, 64)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    encoded = base64.b64encode(huge).decode()
    origin = Provenance(task_id="", scene="", goal="", split="", success=True)
    row = one_step_episode("t").to_json()
    row["steps"][0]["image"] = encoded
    for read in (
        lambda: open_picture(huge),
        lambda: pictures_of([MemoryEntry("a", "", origin, (huge,))]),
        lambda: episode_from_json(row),
    ):
        with pytest.raises(ValueError, match="pixels that can be decoded"):
            read()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    assert picture_of_message({"role": "user", "content": [url]}) is None


def test_only_the_formats_that_are_asked_for_are_decoded() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2)).save(buffer, format="TIFF")
    with pytest.raises(ValueError, match="not a PNG or JPEG"):
        open_picture(buffer.getvalue(), ("PNG", "JPEG"))


def test_a_compressed_body_is_not_expanded() -> None:
    pytest.importorskip("fastapi", reason="the service needs the extra serve")
    from starlette.testclient import TestClient

    from tests.fuzz.services import application

    app, _ = application()
    headers = {"authorization": "Bearer key", "content-encoding": "gzip", "content-type": "application/json"}
    answer = TestClient(app).post("/compile", content=gzip.compress(b"[" * 10**8), headers=headers)
    assert answer.status_code == 422 and "invalid json" in answer.text.lower()


# -- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["../../evil", "/etc/passwd", "a/../../b", "..", "\x00", "~/x", "a" * 5000])
def test_an_id_of_a_session_is_never_a_path(id: str, tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "in" / "sessions", SessionsConfig())
    store.use(id, "a goal", "home 1")
    [file] = (tmp_path / "in" / "sessions").iterdir()
    assert file.suffix == ".jsonl" and len(file.name) == 32 + len(".jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [each.id for each in SessionStore(tmp_path / "in" / "sessions", SessionsConfig())] == [id]
