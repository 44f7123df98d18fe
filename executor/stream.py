"""What a caller reads of one request, in the caller's own thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor.errors import SpeclaneError
from executor.request import Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from queue import SimpleQueue

    from executor.request import Delta


class Stream:
    """Iterate over what a request generates, a Delta per round; then `completion` holds the whole.

    Leaving the loop early, or `close`, cancels the request.
    """

    def __init__(
        self, outputs: SimpleQueue[Delta | Completion | SpeclaneError], cancel: Callable[[], None]
    ) -> None:
        self._outputs = outputs
        self._cancel = cancel
        self._completion: Completion | None = None
        self._failure: SpeclaneError | None = None

    def __iter__(self) -> Iterator[Delta]:
        """Raises what the request failed of."""
        try:
            while self._completion is None:
                if self._failure is not None:
                    raise self._failure
                output = self._outputs.get()
                if isinstance(output, SpeclaneError):
                    self._failure = output
                elif isinstance(output, Completion):
                    self._completion = output
                else:
                    yield output
        finally:
            self.close()

    def close(self) -> None:
        if self._completion is None and self._failure is None:
            self._cancel()

    @property
    def completion(self) -> Completion:
        """Raises RuntimeError before the iteration has ended."""
        if self._completion is None:
            raise RuntimeError("the stream has not ended; iterate over it first")
        return self._completion
