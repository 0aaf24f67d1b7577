from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.cpu import dispatch
from kernels.cuda import dispatch as cuda


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the emulated kernels are compiled to, once."""
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(params=["reference", "native"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the test once with each implementation of the operators."""
    yield from _chosen(request.param, monkeypatch)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Insist on the native kernels."""
    yield from _chosen("native", monkeypatch)


@pytest.fixture
def cuda_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Insist on the compiled kernels on a GPU, and give back what the test took of its memory."""
    monkeypatch.setenv("TANGRAM_KERNELS", "native")
    cuda.native.cache_clear()
    cuda.launch.cache_clear()
    yield
    cuda.native.cache_clear()
    cuda.launch.cache_clear()
    torch.cuda.empty_cache()


def _chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TANGRAM_KERNELS", name)
    dispatch.native.cache_clear()
    yield name
    dispatch.native.cache_clear()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep to one thread unless a test is about threads: the cases are small, and other tests may run
    beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
