"""speclane's executor: speculative decoding with each lane in its own process."""

from executor.config import Config, Timeouts
from executor.errors import Closed, InvalidConfig, InvalidRequest, LaneFailed, SpeclaneError
from executor.llm import LLM, Stream
from executor.request import Completion, Delta
from executor.sampling import SamplingParams

__all__ = [
    "LLM",
    "Closed",
    "Completion",
    "Config",
    "Delta",
    "InvalidConfig",
    "InvalidRequest",
    "LaneFailed",
    "SamplingParams",
    "SpeclaneError",
    "Stream",
    "Timeouts",
]
