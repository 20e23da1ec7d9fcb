"""Records: the logs of requests that a server writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cpuserve.api.http.access_log import AccessLog
from cpuserve.base.errors import ConfigError
from cpuserve.base.log import get_logger
from cpuserve.config.env import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cpuserve.api.http.audit import Audit
    from cpuserve.api.http.traces import Traces
    from cpuserve.config.server import ServerOptions

log = get_logger("serve")


@dataclass(slots=True)
class Records:
    """The access log; the audit log and the traces are None if there are none."""

    access: AccessLog = field(default_factory=AccessLog)
    audit: Audit | None = None
    traces: Traces | None = None

    @property
    def dropped_traces(self) -> Callable[[], int] | None:
        """Returns how many requests have no trace; None = no traces are made."""
        traces = self.traces
        return None if traces is None else lambda: traces.dropped

    def unhealthy(self) -> str | None:
        """Return why requests are refused now; None = they are served."""
        refusal = None if self.audit is None else self.audit.refusal
        return None if refusal is None else refusal.message

    def close(self) -> None:
        """Write what waits to be written; this takes a bounded time."""
        if self.audit is not None:
            self.audit.close()
        if self.traces is not None:
            self.traces.close()


def records_of(options: ServerOptions) -> Records:
    """Return the records that the options ask for.

    Raises:
      ConfigError: the audit file cannot be used, or traces cannot be sent.
    """
    records = Records(AccessLog(options.access_log, options.access_log_format == "json"))
    endpoint = with_path(options.otlp_traces_endpoint) or endpoint_of(environment())
    if endpoint is not None:
        records.traces = _traces(endpoint, asked=options.otlp_traces_endpoint is not None)
    if options.audit is not None:
        from cpuserve.api.http.audit import Audit
        from cpuserve.api.http.audit_file import AuditFile

        refuses = options.audit_on_failure == "refuse"
        path = Path(options.audit).expanduser().absolute()
        file = AuditFile(path, options.audit_bytes, keeps=refuses)
        records.audit = Audit(file, refuses=refuses)
    return records


def with_path(url: str | None) -> str | None:
    """Return a URL with the usual path for traces, if it has none."""
    if url is None or urlsplit(url).path.strip("/"):
        return url
    return url.rstrip("/") + "/v1/traces"


def endpoint_of(env: Mapping[str, str]) -> str | None:
    """Return where the standard variables of OpenTelemetry send traces; None = nowhere."""
    off = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if off or env.get("OTEL_TRACES_EXPORTER", "otlp").strip() != "otlp":
        return None
    if given := env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return given
    base = env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return None if base is None else base.rstrip("/") + "/v1/traces"


def _traces(endpoint: str, *, asked: bool) -> Traces | None:
    """Return the traces that go to `endpoint`.

    asked: whether an option of cpuserve sets it. The variables may be set for all programs,
      so a fault of them is a warning.

    Raises:
      ConfigError: OpenTelemetry is not installed, or the protocol, the address or another value
        cannot be used.
    """
    from cpuserve.api.http.traces import Traces

    try:
        check_protocol(environment(), endpoint)
        return Traces(endpoint, environment())
    except ConfigError as error:
        if asked:
            raise
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but there are no traces: %s", error)
        return None


def check_protocol(env: Mapping[str, str], endpoint: str) -> None:
    """Raise ConfigError unless traces go over HTTP as protobuf."""
    names = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
    given = next((env[name] for name in names if name in env), "http/protobuf").strip()
    if given != "http/protobuf" or not endpoint.startswith(("http://", "https://")):
        msg = (
            f"traces cannot go to {endpoint[:200]} with the protocol {given[:40]}: only "
            "http/protobuf is supported, as for http://localhost:4318/v1/traces"
        )
        raise ConfigError(msg)
