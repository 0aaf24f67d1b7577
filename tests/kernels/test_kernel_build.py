from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import KernelBuildError, KernelConfigError, prepare
from kernels.cpu import build, dispatch, openmp
from kernels.cpu.native import Native
from tests.kernels.ragged_batch import Batch, Sizes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty kernel cache; the operators forget what they loaded."""
    monkeypatch.setenv("TANGRAM_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.delenv("TANGRAM_KERNELS", raising=False)
    dispatch.native.cache_clear()
    dispatch.load.cache_clear()
    yield tmp_path / "kernels"
    dispatch.native.cache_clear()
    dispatch.load.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-anywhere")


def python(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small sources in place of the real ones, which take seconds to compile."""
    directory = tmp_path / "sources"
    directory.mkdir()
    directory.joinpath("binding.cpp").write_text('extern "C" int one() { return 1; }', encoding="utf-8")
    monkeypatch.setattr(build, "SOURCES", directory)
    return directory


BUILD = """
import sys
from pathlib import Path
from kernels.cpu import build
build.SOURCES = Path(sys.argv[1])
print(build.library())
"""


@pytest.mark.usefixtures("cache")
def test_preparing_a_device_compiles_before_the_first_call() -> None:
    prepare(torch.device("cpu"))
    assert list(build.cache_directory().glob("*.so"))
    prepare(torch.device("meta"))  # a device without kernels needs nothing


def test_two_processes_may_build_at_once(cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [python("-c", BUILD, str(sources)) for _ in range(2)]
    outputs = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    (built,) = cache.iterdir()
    assert [out.strip() for out, _ in outputs] == [str(built)] * 2
    stamp = built.stat().st_mtime_ns
    assert build.library() == built
    assert built.stat().st_mtime_ns == stamp
    # A machine without a compiler takes what was built ahead.
    monkeypatch.setenv("CXX", "no-such-compiler-anywhere")
    assert build.library() == built


def test_prebuild_prints_where_the_library_is() -> None:
    process = python("-m", "kernels", "prebuild")
    output, error = process.communicate(timeout=200)
    assert process.returncode == 0, error
    assert Path(output.strip()) == build.library()


def test_other_sources_are_another_library(cache: Path, sources: Path) -> None:
    first = build.library()
    sources.joinpath("binding.cpp").write_text('extern "C" int two() { return 2; }', encoding="utf-8")
    assert build.library() != first


@pytest.mark.usefixtures("cache", "sources")
def test_a_library_that_lacks_a_function_is_refused() -> None:
    with pytest.raises(KernelBuildError, match=r"cannot load .*tangram_append"):
        dispatch.load()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_error_says_what_to_do(cache: Path) -> None:
    with pytest.raises(
        KernelBuildError, match=r"no-such-compiler-anywhere.*install g\+\+.*TANGRAM_KERNELS=reference"
    ):
        build.library()
    process = python("-m", "kernels", "prebuild")
    _, error = process.communicate(timeout=200)
    assert process.returncode == 1
    assert error.startswith("error: no C++ compiler found")


def test_a_failed_compilation_shows_the_compilers_words(cache: Path, sources: Path) -> None:
    sources.joinpath("binding.cpp").write_text("#error the sources are broken", encoding="utf-8")
    with pytest.raises(KernelBuildError, match="the sources are broken"):
        build.library()
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("TANGRAM_KERNEL_CACHE", str(blocked / "kernels"))
    with pytest.raises(KernelBuildError, match=r"cannot write the kernel cache .*file/kernels"):
        build.library()


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANGRAM_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.cache_directory() == Path("/somewhere/tangram/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_directory() == Path.home() / ".cache/tangram/kernels"


@pytest.mark.usefixtures("no_compiler", "cache")
def test_auto_falls_back_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert dispatch.native() is None
        assert dispatch.native() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler found" in caplog.text


@pytest.mark.usefixtures("no_compiler", "cache")
def test_native_does_not_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_KERNELS", "native")
    with pytest.raises(KernelBuildError):
        dispatch.native()


@pytest.mark.usefixtures("no_compiler", "cache")
def test_reference_needs_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TANGRAM_KERNELS", "reference")
    assert dispatch.native() is None
    assert caplog.records == []


@pytest.mark.usefixtures("cache")
def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_KERNELS", "fast")
    with pytest.raises(
        KernelConfigError, match="TANGRAM_KERNELS: 'fast' is not one of auto, native, reference"
    ):
        dispatch.native()


SHARES_THREADS = """
import os
import re
import torch
from tests.kernels.ragged_batch import Batch, Sizes
from kernels import ragged_append, ragged_attention

torch.set_num_threads(3)
torch.randn(600, 600) @ torch.randn(600, 600)
torch.randn(1 << 20).exp_()  # starts torch's own threads
before = len(os.listdir("/proc/self/task"))
batch = Batch(Sizes(chunk=512, window=128, keep=(512, 256)), [640, 640], [600, 600])
ragged_append(batch.step(batch.keys), batch.step(batch.values), batch.pool, *batch.tables, batch.sizes.layout)
query = batch.step(batch.queries)
ragged_attention(torch.empty_like(query), query, batch.pool, *batch.tables, batch.sizes.layout, 0.1)
maps = open("/proc/self/maps").read()
print(len(os.listdir("/proc/self/task")) - before)
print(*sorted(set(re.findall(r"\\S*/lib[gi]?omp5?[-.]\\S*", maps))))
print("tangram-cpu" in maps)
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the process's memory map")
def test_the_kernels_run_on_torchs_threads() -> None:
    process = python("-c", SHARES_THREADS, TANGRAM_KERNELS="native")
    output, error = process.communicate(timeout=200)
    assert process.returncode == 0, error
    added, runtimes, loaded = output.splitlines()
    assert loaded == "True"
    assert added == "0"
    assert len(runtimes.split()) == 1


def test_another_package_s_copy_of_the_runtime_is_not_taken_for_torch_s() -> None:
    """sentencepiece, which vLLM imports, loads a libgomp of its own; its name sorts before torch's."""
    code = (
        "import sentencepiece, torch; from kernels.cpu import openmp;"
        "print(openmp.runtime().link_flags[-1], len(openmp.loaded()))"
    )
    output, error = python("-c", code).communicate(timeout=200)
    assert output.split() == [str(openmp.bundled()[0]), "2"], error


def test_the_runtime_is_the_one_torch_has_loaded() -> None:
    found = openmp.runtime()
    assert Path(found.link_flags[-1]).resolve() in [path.resolve() for path in openmp.loaded()]
    assert torch.get_num_threads() >= 1


def answer_cases(library: Native) -> None:
    """Answer small batches with a library and check them; pages outside the pool it must refuse."""
    cases = [
        (Sizes(head_size=64), [96, 40, 0, 64 * 5 + 33], [40, 40, 0, 1]),
        (Sizes(head_size=34, group=7, dtype=torch.float32), [64 * 3 + 33, 1], [1, 1]),
        (Sizes(page=32, keep=(64, 32), head_size=80, group=1, dtype=torch.float16), [90], [90]),
        (Sizes(head_size=96, group=1, dtype=torch.float16), [64 * 4 + 60], [1]),
        (Sizes(chunk=512, window=128, keep=(48, 512), spare_slots=0), [512 * 3 + 128, 1400], [200, 3]),
    ]
    for sizes, lengths, steps in cases:
        batch = Batch(sizes, lengths, steps)
        key, value, query = (batch.step(parts) for parts in (batch.keys, batch.values, batch.queries))
        geometry = (sizes.page, sizes.ring, sizes.chunk, sizes.window)
        offsets = sizes.layout.offset_tensor(batch.pool.device)
        library.append(key, value, batch.pool, *batch.tables, offsets, *geometry)
        out = torch.empty_like(query)
        library.attention(out, query, batch.pool, *batch.tables, offsets, *geometry, batch.scale)
        torch.testing.assert_close(out.double(), batch.expected(), rtol=2**-8, atol=4e-6)
        wild = (batch.rows + 10**6, *batch.tables[1:])
        with pytest.raises(ValueError, match="outside the pool"):
            library.append(key, value, batch.pool, *wild, offsets, *geometry)
        with pytest.raises(ValueError, match="outside the pool"):
            library.attention(out, query, batch.pool, *wild, offsets, *geometry, batch.scale)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86-64")
@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64"])
def test_narrower_vectors(target: str) -> None:
    answer_cases(Native(build.library(("-O1", f"-march={target}"))))


UNDER_SANITIZERS = """
import sys
from pathlib import Path
from kernels.cpu.native import Native
from tests.kernels.test_kernel_build import answer_cases
answer_cases(Native(Path(sys.argv[1])))
print("clean")
"""


def test_the_sanitizers_find_nothing() -> None:
    """Memory errors and undefined behaviour; the address sanitizer must be loaded ahead of Python."""
    found = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    )
    runtime = Path(found.stdout.strip())
    if not runtime.is_absolute():
        pytest.skip("the compiler brings no sanitizers")
    sanitized = build.library(("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"))
    process = python(
        "-c",
        UNDER_SANITIZERS,
        str(sanitized),
        LD_PRELOAD=str(runtime),
        ASAN_OPTIONS="detect_leaks=0",
        OMP_NUM_THREADS="2",
        OMP_WAIT_POLICY="passive",
    )
    output, error = process.communicate(timeout=200)
    assert process.returncode == 0, error[-3000:]
    assert output.strip() == "clean"
