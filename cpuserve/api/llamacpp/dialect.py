"""The Dialect object of llama-server: its routers and its error format."""

from __future__ import annotations

from cpuserve.api.dialect import Dialect
from cpuserve.api.dialects import LLAMACPP as ERRORS
from cpuserve.api.llamacpp import adapters, models, props, slots, template
from cpuserve.api.llamacpp.completion import infill
from cpuserve.api.llamacpp.completion import router as completion
from cpuserve.api.vectors import llamacpp as embedding

LLAMACPP = Dialect(
    (
        props.router,
        models.router,
        completion.router,
        infill.router,
        embedding.router,
        template.router,
        slots.router,
        adapters.router,
    ),
    ERRORS,
)
