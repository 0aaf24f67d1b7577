"""Building the CUDA kernels needs nvcc and no GPU; most of this needs neither."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import KernelBuildError
from kernels.cuda import build
from kernels.cuda.native import Native

ROOT = Path(__file__).resolve().parents[2]
VARIANT = build.Variant(torch.bfloat16, 128, "sm_90")

# Stands in for nvcc: it tells its version and writes the arguments that it got to its output.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "imitated nvcc 1.0"; exit 0; fi
case "$*" in *HEAD_SIZE=96*) echo "sources are broken" >&2; exit 1;; esac
for last; do :; done
echo "$@" > "$last"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANGRAM_KERNEL_CACHE", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "imitated-nvcc"
    path.write_text(COMPILER, encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("NVCC", str(path))
    return path


@pytest.mark.usefixtures("compiler")
def test_a_variant_is_built_once_and_named_by_what_shapes_it(cache: Path) -> None:
    first = build.library(VARIANT)
    said = first.read_text(encoding="utf-8").split()
    assert "-gencode=arch=compute_90,code=sm_90" in said
    assert "-DTANGRAM_ELEMENT=__nv_bfloat16" in said
    assert "-DTANGRAM_HEAD_SIZE=128" in said
    stamp = first.stat().st_mtime_ns
    assert build.library(VARIANT) == first
    assert first.stat().st_mtime_ns == stamp
    others = [build.Variant(torch.float16, 128, "sm_90"), build.Variant(torch.bfloat16, 64, "sm_90")]
    paths = {build.library(variant) for variant in (*others, build.Variant(torch.bfloat16, 128, "sm_80"))}
    paths.add(build.library(VARIANT, ("-lineinfo",)))
    assert len(paths | {first}) == 5
    assert set(cache.iterdir()) == paths | {first}


def test_other_sources_or_another_compiler_are_another_library(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.library(VARIANT)
    compiler.write_text(COMPILER.replace("1.0", "1.1"), encoding="utf-8")
    second = build.library(VARIANT)
    copy = shutil.copytree(build.SOURCES, tmp_path / "sources")
    monkeypatch.setattr(build, "SOURCES", copy)
    assert build.library(VARIANT) == second
    with copy.joinpath("step.cuh").open("a", encoding="utf-8") as source:
        source.write("// changed\n")
    assert len({first, second, build.library(VARIANT)}) == 3


@pytest.mark.usefixtures("compiler")
def test_a_machine_without_nvcc_takes_what_was_built_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build.library(VARIANT)
    monkeypatch.setenv("NVCC", "no-such-compiler-anywhere")
    assert build.library(VARIANT) == built
    with pytest.raises(KernelBuildError, match=r"no nvcc found \(tried no-such-compiler.*install the CUDA"):
        build.library(build.Variant(torch.float16, 128, "sm_90"))


def test_libraries_built_ahead_come_first(
    tmp_path: Path, cache: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_KERNEL_PREBUILT", str(tmp_path / "ahead"))
    own = build.library(VARIANT)
    assert own.parent == cache
    ahead = build.library(VARIANT, into=tmp_path / "ahead")
    assert ahead.parent == tmp_path / "ahead"
    assert build.library(VARIANT) == ahead
    monkeypatch.setenv("NVCC", "no-such-compiler-anywhere")
    assert build.library(VARIANT) == ahead


@pytest.mark.usefixtures("compiler")
def test_a_failed_compilation_shows_the_compilers_words(cache: Path) -> None:
    with pytest.raises(KernelBuildError, match="sources are broken"):
        build.library(build.Variant(torch.bfloat16, 96, "sm_90"))
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("compiler")
def test_a_file_that_is_no_library_is_refused() -> None:
    with pytest.raises(KernelBuildError, match="cannot load"):
        Native(build.library(VARIANT))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernels", "build-cuda", *arguments],
        cwd=ROOT,
        env=os.environ.copy(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_the_command_builds_every_variant_or_says_why_not(cache: Path, compiler: Path) -> None:
    failed = command("--arch", "sm_80", "sm_90")
    assert failed.returncode == 1
    assert "sources are broken" in failed.stderr
    compiler.write_text(COMPILER.replace("96", "none"), encoding="utf-8")
    done = command("--out", str(cache / "ahead"))
    assert done.returncode == 0, done.stderr
    assert {Path(line) for line in done.stdout.split()} == set((cache / "ahead").iterdir())
    assert len(done.stdout.split()) == len(build.variants(["sm_80", "sm_90"])) == 16
    assert "is not an architecture" in command("--arch", "sm_75").stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernels_compile(arch: str) -> None:
    """And the library loads without a GPU: what it needs of CUDA lies in it."""
    Native(build.library(build.Variant(torch.bfloat16, 128, arch)))
