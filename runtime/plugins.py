"""Registries of environments and memory systems: built-in, registered, and from other packages' entry points.

Another package adds its spec as an entry point with the spec's name. It is loaded on the first lookup of that name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import metadata
from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    @property
    def name(self) -> str: ...


Spec = TypeVar("Spec", bound=Named)


class PluginError(ValueError):
    """An unknown name, or a plugin that cannot be loaded. The message is ready to print."""


class Registry(Generic[Spec]):
    """The specs of one kind by name.

    Args:
        kind: for messages, such as "environment".
        group: entry point group of other packages.
        spec: class of the specs.
        built_in: `module:NAME` of the built-in specs by name.
    """

    def __init__(self, kind: str, group: str, spec: type[Spec], built_in: Mapping[str, str]) -> None:
        self.kind, self.group, self.spec = kind, group, spec
        self.built_in = {name: metadata.EntryPoint(name, place, group) for name, place in built_in.items()}
        self._loaded: dict[str, Spec] = {}  # cached built-in specs
        self._added: dict[str, Spec] = {}  # registered, or loaded from an entry point

    def register(self, spec: Spec) -> None:
        """Register a spec. Raises: PluginError, if the name is taken."""
        if spec.name in self.built_in or self._added.get(spec.name, spec) is not spec:
            raise PluginError(f"the {self.kind} {spec.name!r} exists already")
        self._added[spec.name] = spec

    def find(self, name: str) -> Spec:
        """Return a spec. Raises: PluginError, for an unknown name or a plugin that cannot be loaded."""
        if name in self.built_in:
            if name not in self._loaded:
                self._loaded[name] = self.built_in[name].load()
            return self._loaded[name]
        if name not in self._added:
            point = next(iter(metadata.entry_points(group=self.group, name=name)), None)
            if point is None:
                close = difflib.get_close_matches(name, self.names(), n=1)
                meant = f"; did you mean {close[0]!r}?" if close else ""
                raise PluginError(f"no {self.kind} {name!r}{meant}; there are {', '.join(self.names())}")
            self.register(self._load(point))
        return self._added[name]

    def names(self) -> list[str]:
        """Return all names: built-in, then registered, then those of installed packages."""
        installed = sorted(point.name for point in metadata.entry_points(group=self.group))
        return list(dict.fromkeys([*self.built_in, *self._added, *installed]))

    def loaded(self) -> list[Spec]:
        """Return the built-in specs and the specs that this process has registered or loaded."""
        return [*map(self.find, self.built_in), *self._added.values()]

    def _load(self, point: metadata.EntryPoint) -> Spec:
        where = f"the {self.kind} {point.name!r} of {point.dist.name if point.dist else 'another package'}"
        try:
            spec = point.load()
        except Exception as error:  # importing another package's module may raise anything
            what = f"{type(error).__name__}: {error}"
            raise PluginError(f"{where} cannot be loaded ({point.value}): {what}") from error
        if not isinstance(spec, self.spec) or spec.name != point.name:
            raise PluginError(f"{where} is no {self.spec.__name__} of that name ({point.value} is {spec!r:.80})")
        return spec
