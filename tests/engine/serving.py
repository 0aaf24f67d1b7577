"""An engine behind its API server, as `tangram serve` starts it, for tests that ask it over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from app.managed_engine import free_port
from tangram.client import EngineClient
from tests.leftovers import kill_session
from tests.tree import ROOT

NAME = "tiny"
LASTING = {"ignore_eos": True, "vllm_xargs": {"slowly": 1}}
"""Further fields of a request that is to be looked at while it runs (see slowly.py)."""


@contextlib.contextmanager
def serving(model: Path, options: Sequence[str], folder: Path, key: str | None = None) -> Iterator[str]:
    """The URL of an engine that is ready: float32, a thousand tokens of context, its books checked at every
    step. It is ended afterwards.

    folder: for its log. key: its API key, if it is to want one.
    """
    port = free_port()
    command = [sys.executable, "-m", "tangram", "serve", str(model), *options]
    command += ["--served-model-name", NAME, "--dtype", "float32", "--max-model-len", "1024"]
    command += ["--logits-processors", "tests.engine.slowly:Slowly"]
    command += ["--host", "127.0.0.1", "--port", str(port), *(["--api-key", key] if key else [])]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TANGRAM_CHECK_INTEGRITY": "1",
    }
    log, url = folder / "engine.log", f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        engine = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        asyncio.run(_until_ready(url, key, engine, log))
        yield url
    finally:
        engine.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.wait(60)
        kill_session(engine.pid)
        engine.wait()


async def _until_ready(url: str, key: str | None, engine: subprocess.Popen[bytes], log: Path) -> None:
    async with EngineClient(url, api_key=key) as client:
        while not await client.health():
            if engine.poll() is not None:
                pytest.fail(f"the engine ended with {engine.returncode}:\n{log.read_text()[-6000:]}")
            await asyncio.sleep(0.2)
