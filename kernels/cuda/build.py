"""Compile the CUDA kernels, one library for each element type, head size and architecture.

Nothing but nvcc is needed, and no GPU: the sources know nothing of torch. Libraries lie in the same cache
directory as the CPU's, under a name that hashes sources, flags and compiler. Libraries that were built ahead
for the same sources are taken from ``TANGRAM_KERNEL_PREBUILT``, as in an image without nvcc, or from there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.cpu.build import cache_directory, compile_library, compiler_version, digest
from kernels.errors import KernelBuildError

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden")
ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
HEAD_SIZES = (64, 96, 128, 256)
"""What is built ahead. Any other multiple of 32 up to 256 is built when it is needed."""


@dataclass(frozen=True)
class Variant:
    """One library: an element type, a head size and an architecture such as ``sm_90``."""

    dtype: torch.dtype
    head_size: int
    arch: str

    @property
    def options(self) -> list[str]:
        """nvcc's options for it."""
        number = self.arch.removeprefix("sm_")
        return [
            f"-gencode=arch=compute_{number},code={self.arch}",
            f"-DTANGRAM_ELEMENT={ELEMENTS[self.dtype]}",
            f"-DTANGRAM_HEAD_SIZE={self.head_size}",
        ]

    def __str__(self) -> str:
        return f"{self.arch}-{str(self.dtype).removeprefix('torch.')}-{self.head_size}"


def variants(
    archs: Iterable[str],
    dtypes: Iterable[torch.dtype] = tuple(ELEMENTS),
    head_sizes: Iterable[int] = HEAD_SIZES,
) -> list[Variant]:
    """Everything that is built ahead for these architectures, each named once."""
    every = (Variant(dtype, size, arch) for arch in archs for dtype in dtypes for size in head_sizes)
    return list(dict.fromkeys(every))


def libraries(
    chosen: list[Variant], into: Path | None = None, jobs: int | None = None
) -> Iterator[tuple[Variant, Path]]:
    """``library`` of each variant, in the order in which they are done; ``jobs`` compilers run at a time, by
    default one for each processor.

    Raises:
        KernelBuildError: as ``library``; what was not begun by then is not built.
    """
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        waiting = {pool.submit(library, variant, into=into): variant for variant in chosen}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def library(variant: Variant, flags: tuple[str, ...] = (), into: Path | None = None) -> Path:
    """Path of the compiled library, building it if this machine has not yet.

    Args:
        flags: further options for nvcc; they are part of the library's identity.
        into: build it there, whatever there is elsewhere.

    Raises:
        KernelBuildError: there is no nvcc, it failed, or the cache directory cannot be written.
    """
    options = [*FLAGS, *variant.options, *flags]
    directory, name = into or cache_directory(), f"tangram-cuda-{variant}-{_identity(options)}"
    ahead = os.environ.get("TANGRAM_KERNEL_PREBUILT")
    if ahead and into is None and (found := _newest(Path(ahead), name)):
        return found
    try:
        compiler = find_compiler()
    except KernelBuildError:
        # A machine without nvcc may still hold a library that was built ahead for it.
        if found := _newest(directory, name):
            return found
        raise
    target = directory / f"{name}-{digest([*compiler, compiler_version(compiler)])}.so"
    if not target.exists():
        compile_library([*compiler, *options, str(SOURCES / "binding.cu")], target)
    return target


def find_compiler() -> list[str]:
    """nvcc's command: ``$NVCC``, else the one on the path, else that of ``$CUDA_HOME`` or /usr/local/cuda,
    else the one that the CUDA build of vLLM brings as a Python package."""
    chosen = shlex.split(os.environ.get("NVCC", ""))
    home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    known = [["nvcc"], *([str(folder / "bin" / "nvcc")] for folder in (home, *packaged_toolkits()))]
    for command in [chosen] if chosen else known:
        if shutil.which(command[0]):
            return command
    raise KernelBuildError(
        f"no nvcc found (tried {' '.join(chosen) or f'nvcc on the path and in {home}'}): install the CUDA "
        "toolkit or name its nvcc in NVCC, or set TANGRAM_KERNELS=reference to run the slow kernels"
    )


def packaged_toolkits() -> list[Path]:
    """CUDA toolkits among the installed Python packages, the newest first."""
    roots = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return sorted((path for root in roots for path in Path(root).glob("nvidia/cu[0-9]*")), reverse=True)


def _newest(directory: Path, name: str) -> Path | None:
    return max(directory.glob(f"{name}-*.so"), key=lambda path: path.stat().st_mtime, default=None)


def _identity(options: list[str]) -> str:
    sources = sorted([*SOURCES.glob("*.cuh"), *SOURCES.glob("*.cu")])
    texts = [text for source in sources for text in (source.name, source.read_text(encoding="utf-8"))]
    return digest([*options, *texts])
