"""Platforms: the built-in `cpu` floor, and others through the entry point cpuserve.platforms."""

from __future__ import annotations

from collections.abc import Iterable

from cpuserve import plugins
from cpuserve.errors import ConfigError
from cpuserve.platforms.base import Capabilities, KvLayerFacts, ModelFacts, Platform
from cpuserve.platforms.host import Host

ENTRY_POINTS = "cpuserve.platforms"
FLOOR = "cpu"
REQUIRED = tuple(
    name for name in (*Platform.__annotations__, *vars(Platform)) if not name.startswith("_")
)


def select(
    name: str | None, entry_points: Iterable[plugins.EntryPoint] | None = None
) -> tuple[Platform, list[str]]:
    """The platform `name`, or the best that can run here, and lines to print.

    A plug-in that can run wins over the floor and says so; one that is broken, shadows a built-in,
    shares its name with another or cannot run is a reason in the list.

    Raises:
        ConfigError: `name` is unknown or cannot run; lists every platform with its reason.
    """
    points = plugins.installed(ENTRY_POINTS) if entry_points is None else entry_points
    claims = plugins.claims(points, (FLOOR,))
    wanted = None if name is None or name.lower() == "auto" else name.lower()
    found: dict[str, tuple[Platform, str]] = {}
    reasons = dict(claims.refused)
    for plugin_name, point in claims.accepted.items():
        # Another's import may take seconds or fail: a platform that was named needs none but its.
        if wanted in (None, plugin_name.lower()):
            _try(plugin_name, point, found, reasons)
    if wanted is not None:
        return _forced(wanted, found, reasons, claims), []
    notes = [f"platform {n} is not used: {why}" for n, why in reasons.items()]
    for plugin_name, (plugin, why) in found.items():
        others = [other for other in found if other != plugin_name]
        also = f" ({', '.join(others)} could run, too: --platform chooses)" if others else ""
        return plugin, [*notes, f"platform {plugin_name} REPLACES {FLOOR}: {why}{also}"]
    return _floor(), notes


def _try(
    name: str,
    point: plugins.EntryPoint,
    found: dict[str, tuple[Platform, str]],
    reasons: dict[str, str],
) -> None:
    """Put the plug-in among `found` with its probe's words, or why not among `reasons`."""
    plugin, why = plugins.load(point, lambda made: plugins.lacking(made, REQUIRED))
    if plugin is None:
        reasons[name] = why
        return
    try:
        made = plugin() if isinstance(plugin, type) else plugin
        ok, why = made.probe()
    except Exception as e:  # the probe of a plug-in may fail in any way, too
        ok, why = False, f"its probe failed: {type(e).__name__}: {e}"
    if ok:
        found[name] = made, why
    else:
        reasons[name] = str(why)


def _floor() -> Platform:
    from cpuserve.platforms.cpu import CpuPlatform

    return CpuPlatform()


def _forced(
    name: str,
    found: dict[str, tuple[Platform, str]],
    reasons: dict[str, str],
    claims: plugins.Claims,
) -> Platform:
    if name == FLOOR:
        return _floor()
    for known, (plugin, _) in found.items():
        if known.lower() == name:
            return plugin
    why = "".join(f" ({text})" for known, text in reasons.items() if known.lower() == name)
    here = ", ".join([FLOOR, *claims.accepted])
    msg = f"platform {name!r} cannot be used{why}; platforms here: {here}"
    raise ConfigError(msg)


__all__ = ["Capabilities", "Host", "KvLayerFacts", "ModelFacts", "Platform", "select"]
