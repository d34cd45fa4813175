"""Linear heads over sparse features: fitted by logistic regression, stored as safetensors beside a JSON manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.store import read_json, to_json, write_atomically

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


@dataclass(frozen=True, slots=True)
class Head:
    """A binary classifier: p = sigma(w . x + b)."""

    weights: NDArray[np.float64]
    bias: float

    def __call__(self, x: csr_matrix) -> NDArray[np.float64]:
        return 1 / (1 + np.exp(-(x @ self.weights + self.bias)))


def fit_head(x: csr_matrix, labels: NDArray[np.int64], c: float) -> Head:
    """Fit a head with balanced classes and inverse regularisation strength c. Columns without values get weight 0."""
    from sklearn.linear_model import LogisticRegression

    touched = np.flatnonzero(np.asarray(abs(x).sum(axis=0)).ravel())
    model = LogisticRegression(C=c, class_weight="balanced", max_iter=1000).fit(x[:, touched], labels)
    weights = np.zeros(np.asarray(x.sum(axis=0)).size)
    weights[touched] = model.coef_[0]
    return Head(weights, float(model.intercept_[0]))


def heads_sha256(heads: Mapping[str, Head], more: str = "") -> str:
    """Return the SHA-256 of heads, in their order, and of a text that belongs to them."""
    data = b"".join(np.asarray([*head.weights, head.bias], dtype="<f8").tobytes() for head in heads.values())
    return hashlib.sha256(data + more.encode()).hexdigest()


def save_heads(path: Path, heads: Mapping[str, Head], manifest: Mapping[str, Any], hashed: str) -> None:
    """Write heads as safetensors, and beside them the manifest as JSON, with a hash of the heads and of its field
    `hashed`."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    manifest = {**manifest, "sha256": heads_sha256(heads, manifest.get(hashed, ""))}  # replaces that of loaded heads
    write_atomically(path.with_suffix(".json"), to_json(manifest, indent=1) + "\n")
    save_file({name: np.asarray([*head.weights, head.bias]) for name, head in heads.items()}, path)


def load_heads(path: Path, names: Sequence[str], hashed: str) -> tuple[dict[str, Head], dict[str, Any]]:
    """Read heads and their manifest. Raises: ValueError, if they are missing, unreadable or of two trainings."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors, manifest = load_file(path), read_json(path.with_suffix(".json"))
        heads = {name: Head(tensors[name][:-1], float(tensors[name][-1])) for name in names}
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise ValueError(f"{path} holds no {', '.join(names)} that can be read: {error}") from error
    if heads_sha256(heads, str(manifest.get(hashed, ""))) != manifest.get("sha256"):
        raise ValueError(f"{path} does not match the hash in {path.with_suffix('.json').name}: train it again")
    return heads, manifest
