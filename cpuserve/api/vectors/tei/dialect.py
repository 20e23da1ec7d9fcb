"""The Dialect object of text-embeddings-inference (TEI), without the routes that it shares."""

from __future__ import annotations

from cpuserve.api.dialect import Dialect
from cpuserve.api.dialects import TEI as TEI_ERRORS
from cpuserve.api.vectors.tei import info, router, token_labels, tokens

TEI = Dialect((router.router, tokens.router, token_labels.router, info.router), TEI_ERRORS)
