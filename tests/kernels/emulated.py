"""The CUDA kernels on a CPU, where there is no GPU to run them: see ``emulation``.

What Python does for a launch is the product's own (:mod:`kernels.cuda.dispatch`, packing and all); only where
it would launch a kernel, the kernel's source, compiled for the CPU, runs on the CPU's memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.cpu.build import find_compiler
from kernels.cuda import build, dispatch
from kernels.cuda.native import Native
from kernels.errors import KernelError

HERE = Path(__file__).parent / "emulation"
FLAGS = (
    "-O2",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wno-sign-compare",
    "-Wno-unknown-pragmas",
)
ORDERS = ("forward", "backward", "scattered")
"""In which threads of a block go on."""
OPERATORS = ("append", "attention", "append_attention", "seal", "stage", "unpack")
HEAD_SIZES = (32, 64, 96, 128, 256)


@cache
def library(folder: Path) -> ctypes.CDLL:
    """The compiled kernels; ``folder``: where they are compiled to, once for the same sources."""
    sources = sorted([*HERE.iterdir(), *build.SOURCES.glob("*.cuh")])
    name = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    target = folder / f"emulated-{name}.so"
    if not target.exists():
        made = target.with_suffix(f".{os.getpid()}")
        command = [*find_compiler(), *FLAGS, f"-I{HERE}", f"-I{build.SOURCES}", str(HERE / "kernels.cpp")]
        subprocess.run([*command, "-o", str(made)], check=True)
        made.rename(target)
    return ctypes.CDLL(str(target))


class Emulated(Native):
    """As a compiled CUDA library, on CPU tensors.

    Attributes:
        called: functions in the order of their calls.
    """

    def __init__(self, functions: ctypes.CDLL, dtype: torch.dtype, head_size: int, order: str) -> None:
        self._library, self._dtype, self._head_size = functions, dtype, head_size
        self._order = ORDERS.index(order)
        self.called: list[str] = []

    def workspace(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """As :meth:`Native.workspace`; what is not written before it is read shows."""
        sizes = (ctypes.c_int64 * 4)()
        self._library.emulated_workspace(int(self._dtype == torch.bfloat16), self._head_size, sizes)
        partial, counters, plan, pieces = sizes
        self._workspace = (
            torch.full((partial,), float("nan")),
            torch.zeros(counters, dtype=torch.int32),
            torch.full((plan,), 2**30, dtype=torch.int32),
            torch.full((pieces,), 0xFF, dtype=torch.uint8),
        )
        return self._workspace

    def _run(self, name: str, pool: torch.Tensor, step: bytes, rest: bytes) -> None:
        assert pool.device.type == "cpu"
        sizes = (int(self._dtype == torch.bfloat16), self._head_size, self._order)
        failed = getattr(self._library, f"emulated_{name}")(step, rest, *sizes)
        if failed:
            raise KernelError(f"{name}: " + ("threads wait in vain" if failed == 1 else "not built"))
        self.called.append(name)


@contextmanager
def emulated(folder: Path, order: str = "forward") -> Iterator[list[str]]:
    """Have the registered operators run the emulated kernels; gives the names of those that ran."""
    called: list[str] = []

    def native(device: torch.device, dtype: torch.dtype, head_size: int) -> Emulated | None:
        if dtype not in build.ELEMENTS or head_size not in HEAD_SIZES:
            return None
        made = Emulated(library(folder), dtype, head_size, order)
        made.called = called
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "native", native)
        for name in OPERATORS:
            operator: Any = SimpleNamespace(default=getattr(dispatch, name))
            patch.setattr(torch.ops.tangram, f"ragged_{name}", operator)
        yield called
