"""Whether a step needs compiling, guessed from what it shows: without memory, and without a language model.

A compiler that reads M to say that there is nothing to say costs as much as one that guides. Which steps are guided
hardly depends on M: where the agent is on its way to what it knows, nobody says anything. So a linear function of the
words of state, view and actions tells beforehand, fitted to the rows that the compiler was trained on
(`training.need`), and kept beside its checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.checkpoint import CheckpointError, beside, find
from compiler.prompt import state_text
from compiler.records import CompileRequest
from memory.linear import Head, heads_sha256, load_heads, save_heads
from memory.words import words

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

FILE, HEAD = "need.safetensors", "need"
WIDTH = 2**13  # dimensions of phi
MANY = 3  # in common: more are not told apart
FEATURES = "2"  # raised where phi becomes another: what was fitted to the old one says nothing then
_WORD = re.compile(r"[^\W\d_]+|\d+")


@dataclass(frozen=True, slots=True)
class Need:
    """p = sigma(w . phi(step) + b), and the p from which on a step is compiled. `manifest`: what it was fitted to."""

    head: Head
    threshold: float
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, request: CompileRequest) -> float:
        """Return how likely the compiler would guide."""
        return float(self.head(features([request]))[0])

    @property
    def sha256(self) -> str:
        return heads_sha256({HEAD: self.head}, str(self.threshold))

    def save(self, folder: Path) -> None:
        """Write need.safetensors and, with the manifest, need.json."""
        told = {**self.manifest, "features": FEATURES, "threshold": str(self.threshold)}
        save_heads(folder / FILE, {HEAD: self.head}, told, "threshold")


def features(requests: Iterable[CompileRequest]) -> csr_matrix:
    """Hash the words of each step, and their pairs, by the line that they stand in: phi (n, WIDTH)."""
    from scipy.sparse import csr_matrix
    from sklearn.feature_extraction import FeatureHasher

    return csr_matrix(FeatureHasher(WIDTH, input_type="string").transform(map(_words, requests)))


def _words(request: CompileRequest) -> list[str]:
    """Every line's words and pairs of words; and of every two lines how many they have in common, for whether what is
    looked for is in view, or was taken, shows in any environment's words alike."""
    found, lines = ["bias"], dict[str, tuple[set[str], set[tuple[str, str]]]]()
    state = state_text(replace(request, history=())).splitlines()
    before, did = request.history[:-1], request.history[-1:]
    for line in (*state, f"before: {' ; '.join(before)}", f"did: {' ; '.join(did)}", f"see: {request.observation}"):
        head, _, text = line.partition(":")
        said = _WORD.findall(text.lower()) if text.isascii() else words(text)
        found += [f"{head} {word}" for word in said] + [f"{head} {a} {b}" for a, b in pairwise(said)]
        lines[head] = set(said), set(pairwise(said))
    for (head, one), (other, two) in combinations(lines.items(), 2):
        for what, a, b in zip(("words", "pairs"), one, two, strict=True):
            found.append(f"{head} {other} {what} {min(len(a & b), MANY)}")
    return found


def need_of(checkpoint: str | None, threshold: float | None = None) -> Need | None:
    """Read what stands beside a checkpoint; None where nothing does. `threshold`: another than its own. Raises:
    CheckpointError, where it cannot be read."""
    path = beside(find(Path(checkpoint)), FILE) if checkpoint else None
    if path is None:
        return None
    try:
        heads, manifest = load_heads(path, (HEAD,), hashed="threshold")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if manifest.get("features") != FEATURES:
        again = "`memcompiler train need RUN` fits another"
        raise CheckpointError(f"{path} was fitted to features of another version of this program: {again}")
    return Need(heads[HEAD], float(manifest["threshold"]) if threshold is None else threshold, manifest)


def need_for(asked: Sequence[str], checkpoint: str | None, threshold: float | None = None) -> Need | None:
    """Read it for the deliveries that ask it, as `need_of`; None where none does. Raises: CheckpointError, also where
    nothing stands there."""
    if not asked:
        return None
    need = need_of(checkpoint, threshold)
    if need is None:
        raise CheckpointError(
            f"delivery {asked[0]} asks what `memcompiler train need RUN` leaves beside an SFT run's checkpoints: "
            f"beside compiler.checkpoint={checkpoint} there is nothing"
        )
    return need


def keep_need(checkpoint: str | None, run: Path) -> None:
    """Copy what stands beside a checkpoint that a run goes on from into the run's folder."""
    need = need_of(checkpoint)
    if need is not None:
        need.save(run)
