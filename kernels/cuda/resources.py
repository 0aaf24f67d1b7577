"""What the compiled kernels take of a multiprocessor: registers, and memory where registers did not suffice.

Needs nvcc and no GPU. The numbers are the assembler's own (``ptxas -v``).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from kernels.cpu.build import run_compiler
from kernels.cuda.build import FLAGS, SOURCES, Variant, find_compiler
from kernels.errors import KernelBuildError

_KERNEL = re.compile(
    r"Compiling entry function '\w*?\d(?P<name>[a-z]+_kernel)\w*'"
    r".*?(?P<stack>\d+) bytes stack frame"
    r", (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Usage:
    """What a thread of one kernel takes: registers, bytes of stack, bytes spilled and reloaded."""

    kernel: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def usage(variant: Variant) -> list[Usage]:
    """Assemble a variant and read what each of its kernels takes.

    Raises:
        KernelBuildError: there is no nvcc, it failed, or it said nothing that is understood.
    """
    options = [flag for flag in (*FLAGS, *variant.options) if flag != "-shared"]
    verbose = ["-cubin", "-Xptxas", "-v", str(SOURCES / "binding.cu"), "-o", os.devnull]
    said = run_compiler([*find_compiler(), *options, *verbose]).stderr
    found = parse(said)
    if not found:
        raise KernelBuildError(f"{variant}: nvcc told of no kernel:\n{said[-4000:]}")
    return found


def parse(text: str) -> list[Usage]:
    """Every kernel that ``ptxas -v`` told of."""
    return [
        Usage(
            match["name"],
            int(match["registers"]),
            int(match["stack"]),
            int(match["stores"]),
            int(match["loads"]),
        )
        for match in _KERNEL.finditer(text)
    ]
