"""Find the OpenMP runtime that torch uses, so that the kernels share its threads.

A second runtime would bring a second pool of threads that spin on the same cores. Torch's wheels carry
their own copy of libgomp, at times under a name of its own, so a plain ``-fopenmp`` would load the system's
copy beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class OpenMP:
    """Compiler and linker options for one runtime, and what tells it apart from others."""

    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    identity: str


def runtime() -> OpenMP:
    """Torch's bundled runtime, else the one this process has loaded, else the compiler's own.

    Other packages may bring and load copies of their own, so what is loaded does not tell which is torch's.
    """
    for library in (*bundled(), *loaded()):
        # The library is named in full: a "-fopenmp" at link time would add the compiler's own copy.
        return OpenMP(
            ("-fopenmp",), ("-Wl,--no-as-needed", str(library)), f"{library} {library.stat().st_size}"
        )
    return OpenMP(("-fopenmp",), (), "default")


def bundled() -> list[Path]:
    """libgomp files inside torch's installation."""
    return sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))


def loaded() -> list[Path]:
    """libgomp files mapped into this process."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}
    return [Path(path) for path in sorted(paths) if Path(path).is_file()]
