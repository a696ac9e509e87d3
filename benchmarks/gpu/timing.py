"""Device time of a function: many calls inside one program, so that the host's part of a call does not count.

The calls stand in the body of a loop with a fixed number of rounds, one per set of inputs. Each depends on the one
before it through an optimization barrier, so that no compiler pass moves one out of the loop or drops one; the barrier
itself compiles to nothing, late. Calls with the same inputs would be merged after that, hence the sets. The outputs are
carried around the loop, so they are really written. Arguments that a function updates in place are carried instead of
copied. Short calls get many sets, which also makes them read from memory, not from the device's last cache.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

RUN_SECONDS = 0.01
MAX_RUNS = 7
MEASURE_SECONDS = 0.25
MAX_SETS = 8
SHORT_SECONDS = 1e-4
"""Of a call next to which the loop's own counter would show."""

SETS_BYTES = 6 << 30


@dataclass(frozen=True)
class Plan:
    """How often a function is called.

    Attributes:
        sets: of inputs, each used once in a round.
        rounds: of the loop.
    """

    sets: int
    rounds: int

    @classmethod
    def make(cls, expected: float, moved_bytes: int, input_bytes: int, l2_bytes: int) -> "Plan":
        """Args:
        expected: seconds of a call, roughly.
        moved_bytes: that a call reads and writes at least.
        input_bytes: of one set of inputs.
        l2_bytes: of the device's last cache.
        """
        by_cache = math.ceil(3 * l2_bytes / max(moved_bytes, 1))
        wanted = MAX_SETS if expected < SHORT_SECONDS else min(by_cache, MAX_SETS)
        sets = max(1, min(wanted, SETS_BYTES // max(input_bytes, 1)))
        rounds = math.ceil(RUN_SECONDS / (sets * max(expected, 1e-6)))
        return cls(sets, max(1, min(rounds, 1000)))


SMOKE_PLAN = Plan(sets=2, rounds=2)


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
        best, median: over the runs; noise only adds.
        runs: of the program that were measured.
    """

    best: float
    median: float
    runs: int


class Repeated:
    """A program that calls a function many times.

    Args:
        function: of arrays or pytrees of them.
        donate: arguments that it returns updated, in this order, as the first of its outputs that have their shapes.
        inputs: shapes of one set of arguments.
    """

    def __init__(
        self, function: Callable[..., Any], donate: Sequence[int], inputs: tuple[Any, ...], plan: Plan
    ) -> None:
        self.plan = plan
        self._function = jax.jit(function)  # traced once, whatever the number of calls
        self._donate = tuple(donate)
        self._shapes = inputs
        self._outputs = jax.tree.leaves(jax.eval_shape(function, *inputs))
        self._kept = self._match()

    def compile(self, **options: Any) -> "Program":
        """Compiles the program; ``options`` are the compiler's."""
        sets = (self._shapes,) * self.plan.sets
        carry = jax.eval_shape(self._first_carry, sets)
        program = jax.jit(self._loop, donate_argnums=(0,)).lower(carry, sets)
        return Program(self, program.compile(compiler_options=options or None))

    def first_carry(self, sets: tuple[Any, ...]) -> list[list[jax.Array]]:
        """What the loop starts with; shares no memory with ``sets``."""
        return jax.tree.map(jnp.copy, self._first_carry(sets))

    def _match(self) -> dict[int, int]:
        """Index of an output -> index among the leaves of the donated arguments, which it replaces."""
        kept: dict[int, int] = {}
        donated = jax.tree.leaves([self._shapes[i] for i in self._donate])
        for index, leaf in enumerate(donated):
            fits = [
                o
                for o, output in enumerate(self._outputs)
                if o not in kept and (output.shape, output.dtype) == (leaf.shape, leaf.dtype)
            ]
            if not fits:
                raise ValueError(
                    f"donated array {index} of shape {leaf.shape} and type {leaf.dtype} has no output like it"
                )
            kept[fits[0]] = index
        return kept

    def _first_carry(self, sets: tuple[Any, ...]) -> list[list[jax.Array]]:
        carry = []
        for arguments in sets:
            donated = jax.tree.leaves([arguments[i] for i in self._donate])
            carry.append(
                [
                    donated[self._kept[o]] if o in self._kept else jnp.zeros(output.shape, output.dtype)
                    for o, output in enumerate(self._outputs)
                ]
            )
        return carry

    def _loop(self, carry: list[list[jax.Array]], sets: tuple[Any, ...]) -> list[list[jax.Array]]:
        def body(_: jax.Array, carry: list[list[jax.Array]]) -> list[list[jax.Array]]:
            carry = list(carry)
            token = carry[-1]
            for which, inputs in enumerate(sets):
                arguments = self._with_donated(inputs, carry[which])
                arguments, token = lax.optimization_barrier((arguments, token))
                token = carry[which] = jax.tree.leaves(self._function(*arguments))
            return carry

        return lax.fori_loop(0, self.plan.rounds, body, carry)

    def _with_donated(self, arguments: tuple[Any, ...], outputs: list[jax.Array]) -> tuple[Any, ...]:
        """The arguments with the donated ones as the last call left them."""
        leaves, structure = jax.tree.flatten([arguments[i] for i in self._donate])
        for output, index in self._kept.items():
            leaves[index] = outputs[output]
        replaced = dict(zip(self._donate, jax.tree.unflatten(structure, leaves)))
        return tuple(replaced.get(i, argument) for i, argument in enumerate(arguments))


@dataclass(frozen=True)
class Program:
    """A compiled ``Repeated``."""

    repeated: Repeated
    compiled: jax.stages.Compiled

    def measure(self, sets: tuple[Any, ...]) -> Timing:
        """Runs the program a few times on sets of inputs; the first run is not counted."""
        plan = self.repeated.plan
        carry = jax.block_until_ready(self.compiled(self.repeated.first_carry(sets), sets))
        seconds: list[float] = []
        while len(seconds) < MAX_RUNS and sum(seconds) < MEASURE_SECONDS:
            start = time.perf_counter()
            carry = jax.block_until_ready(self.compiled(carry, sets))
            seconds.append(time.perf_counter() - start)
        calls = plan.sets * plan.rounds
        return Timing(min(seconds) / calls, statistics.median(seconds) / calls, len(seconds))


def host_seconds(function: Callable[..., Any], *arguments: Any, calls: int = 200) -> float:
    """Seconds that the host takes to dispatch a compiled function, without waiting for it."""
    jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    results = [function(*arguments) for _ in range(calls)]
    seconds = time.perf_counter() - start
    jax.block_until_ready(results)
    return seconds / calls


def nbytes(tree: Any) -> int:
    """Bytes of the arrays, or shapes of arrays, in a pytree."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
