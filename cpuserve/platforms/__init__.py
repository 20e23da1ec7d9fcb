"""Platforms: the built-in one, `cpu`, and plug-ins with the entry point cpuserve.platforms."""

from __future__ import annotations

from collections.abc import Iterable

from cpuserve.base import plugins
from cpuserve.base.errors import ConfigError
from cpuserve.platforms.base import Capabilities, KvLayerFacts, ModelFacts, Platform
from cpuserve.platforms.host import Host

ENTRY_POINTS = "cpuserve.platforms"
BUILT_IN = "cpu"
REQUIRED = tuple(
    name for name in (*Platform.__annotations__, *vars(Platform)) if not name.startswith("_")
)


def select(
    name: str | None, entry_points: Iterable[plugins.EntryPoint] | None = None
) -> tuple[Platform, list[str]]:
    """Return the platform `name`, or the best one that can run here, and lines to print.

    A plug-in that can run takes precedence over the built-in platform, and a line says so.
    For each plug-in that is not used, a line says why: it cannot run,
    is broken, has the name of the built-in platform, or shares its name with another plug-in.

    Raises:
        ConfigError: `name` is unknown or cannot run (the message has every platform and its
            reason), or only the built-in platform is left and this CPU is too old for it.
    """
    points = plugins.installed(ENTRY_POINTS) if entry_points is None else entry_points
    claims = plugins.claims(points, (BUILT_IN,))
    wanted = None if name is None or name.lower() == "auto" else name.lower()
    found: dict[str, tuple[Platform, str]] = {}
    reasons = dict(claims.refused)
    for plugin_name, point in claims.accepted.items():
        # An import may take seconds or fail,
        # so if a platform was requested, import only its plug-in.
        if wanted in (None, plugin_name.lower()):
            _try(plugin_name, point, found, reasons)
    if wanted is not None:
        return _forced(wanted, found, reasons, claims), []
    notes = [f"platform {n} is not used: {why}" for n, why in reasons.items()]
    for plugin_name, (plugin, why) in found.items():
        others = [other for other in found if other != plugin_name]
        also = f" ({', '.join(others)} could run, too: choose with --platform)" if others else ""
        return plugin, [*notes, f"platform {plugin_name} REPLACES {BUILT_IN}: {why}{also}"]
    return _built_in(), notes


def _try(
    name: str,
    point: plugins.EntryPoint,
    found: dict[str, tuple[Platform, str]],
    reasons: dict[str, str],
) -> None:
    """Add the plug-in to `found` with the text of its probe, or to `reasons` with the cause."""
    plugin, why = plugins.load(point, lambda made: plugins.lacking(made, REQUIRED))
    if plugin is None:
        reasons[name] = why
        return
    try:
        made = plugin() if isinstance(plugin, type) else plugin
        ok, why = made.probe()
    except Exception as e:  # the probe of a plug-in may raise any error
        ok, why = False, f"its probe failed: {type(e).__name__}: {e}"
    if ok:
        found[name] = made, why
    else:
        reasons[name] = str(why)


def _built_in() -> Platform:
    from cpuserve.platforms.cpu import CpuPlatform

    platform = CpuPlatform()
    ok, why = platform.probe()
    if not ok:
        msg = f"cpuserve cannot run on this machine: {why}"
        raise ConfigError(msg)
    return platform


def _forced(
    name: str,
    found: dict[str, tuple[Platform, str]],
    reasons: dict[str, str],
    claims: plugins.Claims,
) -> Platform:
    if name == BUILT_IN:
        return _built_in()
    for known, (plugin, _) in found.items():
        if known.lower() == name:
            return plugin
    why = "".join(f" ({text})" for known, text in reasons.items() if known.lower() == name)
    here = ", ".join([BUILT_IN, *claims.accepted])
    msg = f"platform {name!r} cannot be used{why}; set --platform to one of: {here}"
    raise ConfigError(msg)


__all__ = ["Capabilities", "Host", "KvLayerFacts", "ModelFacts", "Platform", "select"]
