"""The sampling parameters of `LLM`, in the module of vLLM."""

from __future__ import annotations

from cpuserve.sampling.beams import BeamSearchParams
from cpuserve.sampling.fields import RequestOutputKind
from cpuserve.sampling.params import SamplingParams, SamplingType
from cpuserve.sampling.repetition import RepetitionDetection as RepetitionDetectionParams
from cpuserve.sampling.structured import StructuredOutputs as StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]
