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
from kernels.cuda import build, resources
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
    for name in ("TANGRAM_KERNEL_PREBUILT", "NVCC"):
        monkeypatch.delenv(name, raising=False)
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
        timeout=200,
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
    assert "16 of 16: sm_" in done.stderr


@pytest.mark.usefixtures("compiler")
def test_the_command_builds_what_is_asked_for(cache: Path) -> None:
    few = command("--arch", "sm_80", "--arch", "sm_90", "--dtype", "float16", "--head-size", "64", "160")
    assert few.returncode == 0, few.stderr
    names = {"sm_80-float16-64", "sm_80-float16-160", "sm_90-float16-64", "sm_90-float16-160"}
    assert {Path(line).name.removeprefix("tangram-cuda-")[:-37] for line in few.stdout.split()} == names
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_75"], "'sm_75' is not an architecture from sm_80 on"),
        (["--dtype", "float32"], "'float32' is not one of bfloat16, float16"),
        (["--head-size", "80"], "'80' is not a multiple of 32 up to 256"),
        (["--head-size", "288"], "'288' is not a multiple of 32 up to 256"),
    ],
)
def test_the_command_refuses(arguments: list[str], message: str) -> None:
    refused = command(*arguments)
    assert refused.returncode == 2
    assert message in refused.stderr


def test_compilers_run_side_by_side(cache: Path, compiler: Path) -> None:
    """Each of two compilers waits until the other has begun: one after the other they would never end."""
    meeting = cache.parent / "meeting"
    meeting.mkdir()
    wait = f"""touch {meeting}/$$; n=0
while [ $(ls {meeting} | wc -l) -lt 2 ]; do n=$((n + 1)); [ $n -gt 600 ] && exit 3; sleep 0.05; done
"""
    compiler.write_text(COMPILER.replace("for last;", wait + "for last;"), encoding="utf-8")
    two = build.variants(["sm_90"], [torch.float16], [64, 128])
    built = dict(build.libraries(two, jobs=2))
    assert set(built) == set(two)
    assert set(built.values()) == set(cache.iterdir())


PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7tangram12merge_kernelI6__halfLi128EEEvNS_4StepEi' for 'sm_90'
ptxas info    : Function properties for _ZN7tangram12merge_kernelI6__halfLi128EEEvNS_4StepEi
    8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 48 registers, used 0 barriers
ptxas info    : Compile time = 81.2 ms
ptxas info    : Compiling entry function '_ZN7tangram13decode_kernelI6__halfLi128EEEvNS_4StepE' for 'sm_90'
ptxas info    : Function properties for _ZN7tangram13decode_kernelI6__halfLi128EEEvNS_4StepE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


def test_what_the_assembler_says_is_understood(compiler: Path) -> None:
    script = f"#!/bin/sh\ncat >&2 <<'END'\n{PTXAS}END\n"
    compiler.write_text(script, encoding="utf-8")
    merge, decode = resources.usage(VARIANT)
    assert merge == resources.Usage("merge_kernel", 48, 8, 12, 20)
    assert decode == resources.Usage("decode_kernel", 168, 0, 0, 0)
    compiler.write_text("#!/bin/sh\n", encoding="utf-8")
    with pytest.raises(KernelBuildError, match="nvcc told of no kernel"):
        resources.usage(VARIANT)


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernels_compile(arch: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of time and without a GPU. A machine without nvcc finds and loads what was built, for all that it
    needs of CUDA lies in it."""
    done = command("--arch", arch, "--dtype", "bfloat16", "--head-size", "128", "--out", str(cache / "ahead"))
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("NVCC", "no-such-compiler-anywhere")
    monkeypatch.setenv("TANGRAM_KERNEL_PREBUILT", str(cache / "ahead"))
    found = build.library(build.Variant(torch.bfloat16, 128, arch))
    assert [str(found)] == done.stdout.split()
    Native(found)


# Bytes that a thread may keep in memory for want of registers, (stack, spilled): none but these.
SPILLS = {("sm_80", 64, "decode_kernel"): (16, 32), ("sm_80", 128, "prefill_kernel"): (64, 256)}


@needs_nvcc
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_registers_suffice(arch: str, head_size: int) -> None:
    found = resources.usage(build.Variant(torch.bfloat16, head_size, arch))
    assert {"append_kernel", "decode_kernel", "prefill_kernel", "merge_kernel", "seal_kernel"} <= {
        of.kernel for of in found
    }
    for of in found:
        stack, spilled = SPILLS.get((arch, head_size, of.kernel), (0, 0))
        assert of.stack <= stack, of
        assert of.spill_stores <= spilled, of
