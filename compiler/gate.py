"""The compile gate: predicts from a step alone, without memory or a language model, whether the compiler would guide.

A compilation without guidance costs as much as one with guidance, and whether a step needs guidance hardly depends on
M. So a linear classifier of the words of state, view and actions decides which steps are compiled. `training.gate` fits
it to the rows that the compiler was trained on; its file is beside the checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compiler.checkpoint import CheckpointError, find, run_file
from compiler.prompt import state_text
from compiler.records import CompileRequest
from memory.linear import Head, fit_head, heads_sha256, load_heads, save_heads
from memory.words import words

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

FILE, HEAD = "gate.safetensors", "need"  # HEAD: name of the tensor in the file
WIDTH = 2**13  # dimensions of phi
MAX_SHARED = 3  # counts of shared words are capped here
FEATURES = "2"  # version of phi: a gate that was fitted to another version is refused
STRENGTHS = (0.01, 0.1, 1.0)  # inverse regularisation strengths to choose from
_WORD = re.compile(r"[^\W\d_]+|\d+")


@dataclass(frozen=True, slots=True)
class CompileGate:
    """p = sigma(w . phi(step) + b). A step is compiled if p >= threshold. `manifest`: what the gate was fitted to."""

    head: Head
    threshold: float
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, request: CompileRequest) -> float:
        """Return the probability that the compiler would guide."""
        return float(self.head(features([request]))[0])

    @property
    def sha256(self) -> str:
        return heads_sha256({HEAD: self.head}, str(self.threshold))

    def save(self, folder: Path) -> None:
        """Write gate.safetensors and its manifest gate.json."""
        manifest = {**self.manifest, "features": FEATURES, "threshold": str(self.threshold)}
        save_heads(folder / FILE, {HEAD: self.head}, manifest, "threshold")


def features(requests: Iterable[CompileRequest]) -> csr_matrix:
    """Hash each step's words and pairs of words, by line, into phi (n, WIDTH)."""
    from scipy.sparse import csr_matrix
    from sklearn.feature_extraction import FeatureHasher

    return csr_matrix(FeatureHasher(WIDTH, input_type="string").transform(map(_tokens, requests)))


def _tokens(request: CompileRequest) -> list[str]:
    """List each line's words and pairs of words, and how many every two lines share.

    The shared counts generalise to unseen words: they show whether the sought thing is in view, or was taken.
    """
    found, lines = ["bias"], dict[str, tuple[set[str], set[tuple[str, str]]]]()
    state = state_text(replace(request, history=())).splitlines()
    before, did = request.history[:-1], request.history[-1:]
    for line in (*state, f"before: {' ; '.join(before)}", f"did: {' ; '.join(did)}", f"see: {request.observation}"):
        head, _, text = line.partition(":")
        terms = _WORD.findall(text.lower()) if text.isascii() else words(text)
        found += [f"{head} {word}" for word in terms] + [f"{head} {a} {b}" for a, b in pairwise(terms)]
        lines[head] = set(terms), set(pairwise(terms))
    for (head, one), (other, two) in combinations(lines.items(), 2):
        for what, a, b in zip(("words", "pairs"), one, two, strict=True):
            found.append(f"{head} {other} {what} {min(len(a & b), MAX_SHARED)}")
    return found


def fit(
    x: Any, guided: NDArray[np.int64], held_x: Any, held_guided: NDArray[np.int64], recall: float
) -> tuple[CompileGate, dict[str, float]]:
    """Fit the gate to phi (n, WIDTH) and labels (n,).

    The threshold is the highest that compiles a share `recall` of the held-out guided steps. C is chosen to compile the
    fewest held-out steps. Return the gate, and its C, share of compiled steps and recall.
    """
    found = []
    for c in STRENGTHS:
        head = fit_head(x, guided, c)
        p = head(held_x)
        ranked = np.sort(p[held_guided == 1])[::-1]
        threshold = float(ranked[max(0, int(np.ceil(recall * len(ranked))) - 1)])
        compiled = p >= threshold
        found.append((compiled.mean(), c, head, threshold, compiled[held_guided == 1].mean()))
    share, c, head, threshold, reached = min(found, key=lambda each: each[:2])
    return CompileGate(head, threshold), {"c": c, "share": float(share), "recall": float(reached)}


def load_gate(checkpoint: str | None, threshold: float | None = None) -> CompileGate | None:
    """Load the gate beside a checkpoint; None if there is none. `threshold` replaces its own. Raises: CheckpointError,
    if the file cannot be read."""
    path = run_file(find(Path(checkpoint)), FILE) if checkpoint else None
    if path is None:
        return None
    try:
        heads, manifest = load_heads(path, (HEAD,), hashed="threshold")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if manifest.get("features") != FEATURES:
        again = "`memcompiler train gate RUN` fits another"
        raise CheckpointError(f"{path} was fitted to features of another version of this program: {again}")
    return CompileGate(heads[HEAD], float(manifest["threshold"]) if threshold is None else threshold, manifest)


def gate_for(deliveries: Sequence[str], checkpoint: str | None, threshold: float | None = None) -> CompileGate | None:
    """Load the gate for the deliveries that use one; None without such deliveries. Raises: CheckpointError, if it is
    missing or cannot be read."""
    if not deliveries:
        return None
    gate = load_gate(checkpoint, threshold)
    if gate is None:
        raise CheckpointError(
            f"delivery {deliveries[0]} needs a compile gate, and there is none beside "
            f"compiler.checkpoint={checkpoint}: run `memcompiler train gate RUN` on the checkpoint's SFT run"
        )
    return gate


def copy_gate(checkpoint: str | None, run: Path) -> None:
    """Copy the gate beside a checkpoint, if there is one, into the folder of a run that continues from it."""
    gate = load_gate(checkpoint)
    if gate is not None:
        gate.save(run)
