"""What the compilers say about a program: registers, spills, shared memory, instructions, launches, copies."""

import re
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from pallas_kernels.aot.toolchain import ptxas

TENSOR_CORES = ("wgmma", "mma.sync", "tcgen05.mma")
"""Instructions of tensor cores, as they appear in PTX."""

_THUNK = re.compile(r"^( *)\d+: (k\w+)", re.MULTILINE)
_LAUNCH = re.compile(r"\] (\S+) grid: \[([\d, ]+)\] threads: \[(\d+), (\d+), (\d+)\].*?shared_memory: (\d+)")
_TRITON = re.compile(r'custom_call_target="__gpu\$xla\.gpu\.triton".*?op_name="[^"]*?([^/"]+)/pallas_call"')
_TRITON_CODE = re.compile(r'\bir = "[^"]*"')
_ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(-start)?\("
)
_MOSAIC_SUFFIX = "_mosaic_gpu_kernel"


@dataclass(frozen=True)
class KernelFacts:
    """One kernel.

    Attributes:
        registers: per thread.
        spill_bytes: stored and loaded, per thread.
        shared_bytes: per block, static and dynamic.
        threads: per block; 0 if it is not known.
        grid: blocks of a launch, as text; empty if it is not known.
        instructions: of tensor cores, those of ``TENSOR_CORES`` that occur.
        pallas: written in Pallas, not made by XLA.
    """

    name: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    grid: str
    instructions: tuple[str, ...]
    pallas: bool


@dataclass(frozen=True)
class ProgramFacts:
    """A compiled program.

    Attributes:
        seconds: tracing, lowering and compiling.
        alias_bytes: of the donated arguments whose buffers are used again, per device.
        temp_bytes: largest sum of the buffers that live during the call, per device.
        thunks: steps of the executable by kind, those of CUDA graphs included.
        launches: what the host launches, by kind; a CUDA graph is one ``kCommandBuffer``.
        collectives: by kind.
        hlo: the program after optimisation, as text.
    """

    seconds: float
    alias_bytes: int
    temp_bytes: int
    kernels: tuple[KernelFacts, ...]
    thunks: dict[str, int]
    launches: dict[str, int]
    collectives: dict[str, int]
    hlo: str = field(repr=False)


def read_dumps(folder: Path, *, hlo: str, seconds: float, alias_bytes: int, temp_bytes: int) -> ProgramFacts:
    """Reads what ``compile.prepare_environment`` made the compilers write into ``folder``."""
    sequences = [path.read_text() for path in sorted(folder.glob("*.thunk_sequence.txt"))]
    # Only written where there is a graph. What is in a graph or a loop is indented.
    grouped = [path.read_text() for path in sorted(folder.glob("*after_thunk_passes.txt"))]
    hosted = grouped or sequences
    shapes = {match[1]: match for text in sequences for match in _LAUNCH.finditer(text)}
    hlo = _TRITON_CODE.sub('ir = ""', hlo)
    triton = set(_TRITON.findall(hlo))
    with ThreadPoolExecutor(2) as pool:
        assembled = list(pool.map(_assemble, sorted(folder.rglob("*.ptx"))))
    kernels = [_with_launch(kernel, shapes, triton) for found in assembled for kernel in found]
    return ProgramFacts(
        seconds=seconds,
        alias_bytes=alias_bytes,
        temp_bytes=temp_bytes,
        kernels=tuple(dict.fromkeys(kernels)),
        thunks=dict(Counter(kind for text in sequences for _, kind in _THUNK.findall(text))),
        launches=dict(
            Counter(kind for text in hosted for indent, kind in _THUNK.findall(text) if not indent)
        ),
        collectives=dict(Counter(match[1] for match in _COLLECTIVE.finditer(hlo))),
        hlo=hlo,
    )


def _assemble(path: Path) -> list[KernelFacts]:
    """Assembles a file once more, to see what the assembler says."""
    text = path.read_text()
    target = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    if target is None:
        return []
    command = [ptxas(), "-v", f"-arch={target[1]}", str(path), "-o", "/dev/null"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = tuple(name for name in TENSOR_CORES if re.search(rf"\b{re.escape(name)}\b", text))
    kernels = []
    for entry in _ENTRY.finditer(log):
        name = entry[1].removesuffix(_MOSAIC_SUFFIX)
        static = _STATIC_SHARED.search(entry[6])
        kernel = KernelFacts(
            name=name,
            arch=entry[2],
            registers=int(entry[5]),
            spill_bytes=int(entry[3]) + int(entry[4]),
            shared_bytes=(int(static[1]) if static else 0) + _mosaic_shared(path),
            threads=_declared_threads(text),
            grid="",
            instructions=found,
            pallas=entry[1].endswith(_MOSAIC_SUFFIX),
        )
        kernels.append(kernel)
    return kernels


def _with_launch(kernel: KernelFacts, shapes: dict[str, re.Match[str]], triton: set[str]) -> KernelFacts:
    # Of several kernels with one name all but the first get a number.
    own = kernel.name in triton or re.sub(r"_\d+$", "", kernel.name) in triton
    kernel = replace(kernel, pallas=kernel.pallas or own)
    match = shapes.get(kernel.name)
    if match is None:
        return kernel
    return replace(
        kernel,
        grid=match[2].replace(" ", ""),
        threads=int(match[3]) * int(match[4]) * int(match[5]),
        shared_bytes=max(kernel.shared_bytes, int(match[6])),
    )


def _declared_threads(ptx: str) -> int:
    match = re.search(r"^\.(?:reqntid|maxntid) (\d+)(?:, (\d+))?(?:, (\d+))?", ptx, re.MULTILINE)
    return int(match[1]) * int(match[2] or 1) * int(match[3] or 1) if match else 0


def _mosaic_shared(ptx: Path) -> int:
    """Dynamic shared memory of a Mosaic kernel, from the file that its compiler writes beside the PTX."""
    path = ptx.with_suffix(".resources.txt")
    match = re.search(r"smem_scratch_bytes=(\d+)", path.read_text()) if path.exists() else None
    return int(match[1]) if match else 0
