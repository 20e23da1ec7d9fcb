"""The Dialect object of llama-server: its routers and its error format."""

from __future__ import annotations

from cpuserve.api.dialect import Dialect
from cpuserve.api.llamacpp import adapters, embedding, models, props, slots, template
from cpuserve.api.llamacpp.completion import infill
from cpuserve.api.llamacpp.completion import router as completion
from cpuserve.api.response.error_format import LLAMACPP as ERRORS

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
