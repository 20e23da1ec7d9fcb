"""The Dialect object of text-generation-inference (TGI), without `POST /`, which TEI shares."""

from __future__ import annotations

from cpuserve.api.dialect import Dialect
from cpuserve.api.dialects import TGI as TGI_ERRORS
from cpuserve.api.tgi import router

TGI = Dialect((router.router,), TGI_ERRORS)
