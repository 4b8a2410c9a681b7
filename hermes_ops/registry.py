"""Entries that a configuration can name: built-in ones, and those of installed packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any, Generic, TypeVar, cast

from hermes_ops.errors import ConfigError, Problem

T = TypeVar("T")


class FactoryRegistry(MutableMapping[str, T], Generic[T]):
    """Map names to factories: the built-in ones, then those of an entry-point group.

    A package adds one by an entry point, in its pyproject.toml:

        [project.entry-points."hermes_ops.policies"]
        shortest = "my_package.shortest:Shortest"

    Entry points are listed by name without an import; one is imported when it is looked up. A
    built-in entry wins over an entry point of its name. Looking up an entry point that cannot be
    imported, or that two packages offer, raises ConfigError with the package and the remedy.
    """

    def __init__(self, group: str, builtin: Mapping[str, T]) -> None:
        self.group = group
        self._entries = dict(builtin)

    @property
    def builtin(self) -> tuple[str, ...]:
        """Return the names of the built-in entries, whatever packages are installed."""
        return tuple(self._entries)

    def __getitem__(self, name: str) -> T:
        if name in self._entries:
            return self._entries[name]
        return cast("T", _loaded(self.group, name))

    def __setitem__(self, name: str, factory: T) -> None:
        self._entries[name] = factory

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in _offered(self.group)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._entries, *(n for n in _offered(self.group) if n not in self._entries)))

    def __len__(self) -> int:
        return len(list(iter(self)))


@cache  # what is installed does not change while a process lives
def _offered(group: str) -> Mapping[str, tuple[Any, ...]]:
    """Return the entry points of the group by name, sorted."""
    from importlib.metadata import entry_points

    offered: dict[str, dict[str, Any]] = {}
    for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.value)):
        offered.setdefault(point.name, {})[point.value] = point
    return {name: tuple(points.values()) for name, points in offered.items()}


def _loaded(group: str, name: str) -> object:
    """Import what the entry point names; KeyError if no package offers it."""
    points = _offered(group)[name]
    if len(points) > 1:
        values = ", ".join(f"{point.value} ({_package(point)})" for point in points)
        problem = Problem(f"{group}.{name}", values, "one", "uninstall all but one of the packages")
        raise ConfigError("the set of installed packages", (problem,))
    (point,) = points
    try:
        return cast("object", point.load())
    except Exception as error:
        fact = f"{point.value} of {_package(point)}: {type(error).__name__}: {error}"
        fix = "correct that package, or uninstall it"
        problem = Problem(f"{group}.{name}", fact, "something that can be imported", fix)
        raise ConfigError("the set of installed packages", (problem,)) from error


def _package(point: Any) -> str:  # noqa: ANN401 - an entry point, whose class is imported late
    return point.dist.name if point.dist is not None else "a package without a name"
