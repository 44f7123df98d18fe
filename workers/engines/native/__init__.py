"""The `native` engine: own code for the Llama family, batch-invariant on CPUs."""

from workers.engines.native.engine import NativeEngine

__all__ = ["NativeEngine"]
