"""Compile the CPU kernels into a shared library, once for each machine and version of the sources.

The library lies in a cache directory (``TANGRAM_KERNEL_CACHE``, else ``$XDG_CACHE_HOME/tangram/kernels``)
under a name that hashes everything that shapes it: sources, flags, compiler, CPU and OpenMP runtime.
Processes that build at the same time do not disturb each other: each compiles to a name of its own and
renames the result.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from kernels.cpu.openmp import OpenMP, runtime
from kernels.errors import KernelBuildError

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")
BUILD_TIMEOUT_S = 300


def library(flags: tuple[str, ...] = ()) -> Path:
    """Path of the compiled library, building it if this machine has not yet.

    Args:
        flags: further compiler options, such as a sanitizer; they are part of the library's identity.

    Raises:
        KernelBuildError: there is no compiler, it failed, or the cache directory cannot be written.
    """
    openmp = runtime()
    options = [*FLAGS, *flags, *openmp.compile_flags]
    directory, name = cache_directory(), f"tangram-cpu-{_identity(options, openmp)}"
    try:
        compiler = find_compiler()
    except KernelBuildError:
        # A machine without a compiler may still hold a library that was built ahead for it.
        prebuilt = sorted(directory.glob(f"{name}-*.so"), key=lambda path: path.stat().st_mtime)
        if not prebuilt:
            raise
        return prebuilt[-1]
    target = directory / f"{name}-{digest([*compiler, compiler_version(compiler)])}.so"
    if not target.exists():
        compile_library([*compiler, *options, str(SOURCES / "binding.cpp"), *openmp.link_flags], target)
    return target


def cache_directory() -> Path:
    """Where compiled libraries are kept."""
    chosen = os.environ.get("TANGRAM_KERNEL_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tangram" / "kernels"


def find_compiler() -> list[str]:
    """The C++ compiler's command: ``$CXX``, else the first of g++, c++ and clang++ that is installed."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    tried = " ".join(chosen) or "g++, c++, clang++"
    raise KernelBuildError(
        f"no C++ compiler found (tried {tried}): install g++ or name one in CXX, "
        "or set TANGRAM_KERNELS=reference to run the slow kernels"
    )


def _identity(options: list[str], openmp: OpenMP) -> str:
    """A name for everything but the compiler: sources, options, OpenMP runtime and CPU."""
    sources = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    texts = [text for source in sources for text in (source.name, source.read_text(encoding="utf-8"))]
    return digest([*options, openmp.identity, _cpu_model(), *texts])


def digest(parts: list[str]) -> str:
    """A short name for a list of texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def compiler_version(compiler: list[str]) -> str:
    """What the compiler says of its version."""
    return _run([*compiler, "--version"]).stdout.strip()


def _cpu_model() -> str:
    """What ``-march=native`` depends on: the processor's name and feature flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "features", "cpu part")
    first = {line for line in lines if line.lower().startswith(wanted)}
    return platform.machine() + "\n".join(sorted(first))


def compile_library(command: list[str], target: Path) -> None:
    """Run a compiler's command, to which ``-o`` is added, and put its library in place in one step.

    Raises:
        KernelBuildError: the command failed or the directory cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=target.parent)
    except OSError as error:
        raise KernelBuildError(f"cannot write the kernel cache {target.parent}: {error}") from error
    os.close(handle)
    built = Path(name)
    try:
        run_compiler([*command, "-o", str(built)])
        built.chmod(0o755)
        built.replace(target)
    finally:
        built.unlink(missing_ok=True)


def run_compiler(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler's command to its end.

    Raises:
        KernelBuildError: it could not be run, or failed; the message ends with what it said.
    """
    result = _run(command)
    if result.returncode:
        raise KernelBuildError(f"{shlex.join(command)} failed:\n{result.stderr[-4000:]}")
    return result


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{shlex.join(command)} could not run: {error}") from error
