"""Records: the logs of requests that a server writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.api.http.access_log import AccessLog

if TYPE_CHECKING:
    from cpuserve.api.http.audit import Audit
    from cpuserve.config.server import ServerOptions


@dataclass(slots=True)
class Records:
    """The access log, and the audit log (None = there is none)."""

    access: AccessLog = field(default_factory=AccessLog)
    audit: Audit | None = None

    def unhealthy(self) -> str | None:
        """Return why requests are refused now; None = they are served."""
        refusal = None if self.audit is None else self.audit.refusal
        return None if refusal is None else refusal.message

    def close(self) -> None:
        """Write what waits to be written; this takes a bounded time."""
        if self.audit is not None:
            self.audit.close()


def records_of(options: ServerOptions) -> Records:
    """Return the records that the options ask for.

    Raises:
      ConfigError: the audit file cannot be used.
    """
    records = Records(AccessLog(options.access_log, options.access_log_format == "json"))
    if options.audit is not None:
        from cpuserve.api.http.audit import Audit
        from cpuserve.api.http.audit_file import AuditFile

        refuses = options.audit_on_failure == "refuse"
        path = Path(options.audit).expanduser().absolute()
        file = AuditFile(path, options.audit_bytes, keeps=refuses)
        records.audit = Audit(file, refuses=refuses)
    return records
