"""Platforms: the built-in `cpu` floor, and others through the entry point cpuserve.platforms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from cpuserve.errors import ConfigError
from cpuserve.platforms.base import KvLayerFacts, ModelFacts, Platform
from cpuserve.platforms.host import Host

ENTRY_POINTS = "cpuserve.platforms"
FLOOR = "cpu"


class EntryPoint(Protocol):
    """What of importlib.metadata.EntryPoint is used here."""

    @property
    def name(self) -> str:
        """The platform's name."""

    def load(self) -> object:
        """The platform class."""


def select(
    name: str | None, entry_points: Iterable[EntryPoint] | None = None
) -> tuple[Platform, list[str]]:
    """The platform `name`, or the best that can run here, and lines to print.

    A plug-in that can run wins over the floor and says so; one that is broken, shadows a built-in
    or cannot run is a reason in the list.

    Raises:
        ConfigError: `name` is unknown or cannot run; lists every platform with its reason.
    """
    found, reasons = _candidates(_installed() if entry_points is None else entry_points)
    if name is not None and name.lower() != "auto":
        return _forced(name, found, reasons), []
    notes = [f"platform {n} is not used: {why}" for n, why in reasons.items()]
    for plugin_name, plugin in found.items():
        ok, why = plugin.probe()
        if ok and plugin_name != FLOOR:
            return plugin, [*notes, f"platform {plugin_name} replaces {FLOOR}: {why}"]
    return found[FLOOR], notes


def _candidates(
    entry_points: Iterable[EntryPoint],
) -> tuple[dict[str, Platform], dict[str, str]]:
    from cpuserve.platforms.cpu import CpuPlatform

    found: dict[str, Platform] = {FLOOR: CpuPlatform()}
    reasons: dict[str, str] = {}
    for entry in entry_points:
        if entry.name in found:
            reasons[f"{entry.name} (plug-in)"] = f"the name {entry.name} is taken"
            continue
        try:
            made = entry.load()
            plugin = made() if callable(made) else made
        except Exception as e:  # a plug-in may fail in any way; its reason is shown
            reasons[entry.name] = f"it does not load: {type(e).__name__}: {e}"
            continue
        if isinstance(plugin, Platform):
            found[entry.name] = plugin
        else:
            reasons[entry.name] = "it lacks a method of cpuserve.platforms.base.Platform"
    return found, reasons


def _forced(name: str, found: dict[str, Platform], reasons: dict[str, str]) -> Platform:
    if name in found:
        ok, why = found[name].probe()
        if ok or name == FLOOR:
            return found[name]
        reasons = {**reasons, name: why}
    known = ", ".join(sorted(found))
    why = f" ({reasons[name]})" if name in reasons else ""
    msg = f"platform {name!r} cannot be used{why}; platforms here: {known}"
    raise ConfigError(msg)


def _installed() -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points

    return sorted(entry_points(group=ENTRY_POINTS), key=lambda e: e.name)


__all__ = ["Host", "KvLayerFacts", "ModelFacts", "Platform", "select"]
