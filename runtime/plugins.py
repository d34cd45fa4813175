"""Things that other packages may add by name: environments, memory systems. Ours, those registered, those offered.

Another package offers its spec as an entry point of a group, named as the thing. It is loaded when it is asked for by
name, and by `memcompiler doctor`.
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
    """Something that does not exist by that name, or whose package cannot be loaded. The message is ready to print."""


class Plugins(Generic[Spec]):
    """All specs of one kind by name.

    Args:
        kind: what one is called in messages: "environment".
        group: the group of entry points by which other packages offer theirs.
        spec: the type of a spec.
        built_in: where ours are, `module:NAME` by name.
    """

    def __init__(self, kind: str, group: str, spec: type[Spec], built_in: Mapping[str, str]) -> None:
        self.kind, self.group, self.spec = kind, group, spec
        self.built_in = {name: metadata.EntryPoint(name, place, group) for name, place in built_in.items()}
        self._ours: dict[str, Spec] = {}  # of the built-in ones those that were asked for: a lookup costs microseconds
        self._known: dict[str, Spec] = {}  # registered, or loaded from an entry point

    def register(self, spec: Spec) -> None:
        """Add one of this program; PluginError where another one has that name."""
        if spec.name in self.built_in or self._known.get(spec.name, spec) is not spec:
            raise PluginError(f"there is {self._a_kind} {spec.name!r} already")
        self._known[spec.name] = spec

    def find(self, name: str) -> Spec:
        """Return the one of that name; PluginError where there is none that can be loaded."""
        if name in self.built_in:
            if name not in self._ours:
                self._ours[name] = self.built_in[name].load()
            return self._ours[name]
        if name not in self._known:
            offered = next(iter(metadata.entry_points(group=self.group, name=name)), None)
            if offered is None:
                close = difflib.get_close_matches(name, self.names(), n=1)
                meant = f"; did you mean {close[0]!r}?" if close else ""
                raise PluginError(f"no {self.kind} {name!r}{meant}; there are {', '.join(self.names())}")
            self.register(self._offered(offered))
        return self._known[name]

    def names(self) -> list[str]:
        """Return all names: ours first, then those registered, then those that installed packages offer."""
        offered = sorted(point.name for point in metadata.entry_points(group=self.group))
        return list(dict.fromkeys([*self.built_in, *self._known, *offered]))

    def loaded(self) -> list[Spec]:
        """Return ours, and those of others that this process has asked for or registered."""
        return [*map(self.find, self.built_in), *self._known.values()]

    @property
    def _a_kind(self) -> str:
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    def _offered(self, offered: metadata.EntryPoint) -> Spec:
        where = f"the {self.kind} {offered.name!r} of {offered.dist.name if offered.dist else 'another package'}"
        try:
            spec = offered.load()
        except Exception as error:  # whatever the import of somebody else's module raises
            what = f"{type(error).__name__}: {error}"
            raise PluginError(f"{where} cannot be loaded ({offered.value}): {what}") from error
        if not isinstance(spec, self.spec) or spec.name != offered.name:
            raise PluginError(f"{where} is no {self.spec.__name__} of that name ({offered.value} is {spec!r:.80})")
        return spec
