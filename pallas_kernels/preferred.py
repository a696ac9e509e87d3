"""An op with two backends: one for the device, and one that takes what the first cannot serve."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pallas_kernels.gpus import Generation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preferred:
    """Calls ``kernel`` where it ``supports`` the arguments, else ``fallback``. Decided while a program is traced.

    Attributes:
        op: name for messages.
        backend: name of the kernel's backend, for messages.
        strict: a fallback is an error.
        interpret: run the kernel in Pallas's interpreter, for tests on machines without a GPU.
        reported: reasons of fallbacks that were logged already.
    """

    op: str
    backend: str
    kernel: Callable[..., Any]
    supports: Callable[..., tuple[bool, str]]
    fallback: Callable[..., Any]
    generation: Generation
    strict: bool
    interpret: bool
    reported: set[str] = field(default_factory=set, compare=False, repr=False)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The op.

        Raises:
            RuntimeError: the kernel does not support the arguments, and ``strict`` forbids the fallback.
        """
        ok, reason = self.supports(*args, **options, generation=self.generation)
        if ok:
            return self.kernel(*args, **options, generation=self.generation, interpret=self.interpret)
        if self.strict:
            raise RuntimeError(
                f"{self.op}: {self.backend} cannot serve this: {reason}; strict forbids the fallback"
            )
        if reason not in self.reported:
            self.reported.add(reason)
            logger.warning("%s: not by %s, because %s", self.op, self.backend, reason)
        return self.fallback(*args, **options)
