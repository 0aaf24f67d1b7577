"""The look at the host: every finding, from probes put in its place, and the choice of a model."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from app.preflight.probes import Gpu, Host, HubAnswer
from app.preflight.problems import Code, PreflightFailed
from app.preflight.start import LARGE_MODEL, SMALL_MODEL, prepare
from app.settings import Settings
from tests.tree import ROOT

GIB = 1 << 30
A100 = Gpu(0, "A100", 80 * GIB, 80 * GIB, (8, 0), "580.65.06")
NOW = 1_800_000_000.0


@dataclass
class Pretended(Host):
    """A host as a test describes it."""

    found: list[Gpu] = field(default_factory=lambda: [A100])
    unwritable: str = ""
    written: float = 0.0
    answer: HubAnswer = field(default_factory=lambda: HubAnswer("ok", NOW))
    here: bool = False
    asked: list[str] = field(default_factory=list)

    def gpus(self) -> list[Gpu]:
        return self.found

    def write_error(self, folder: Path) -> str:
        return self.unwritable

    def user(self) -> int:
        return 10001

    def now(self) -> float:
        return NOW

    def last_write(self, path: Path) -> float:
        return self.written

    def downloaded(self, model: str) -> bool:
        return self.here

    def hub(self, model: str) -> HubAnswer:
        self.asked.append(model)
        return self.answer


def settings(**values: object) -> Settings:
    return Settings(
        home=Path("/data"), **{"expect_gpu": True, "model": "Qwen/Qwen3-4B-Instruct-2507", **values}
    )


def refusal(host: Host, given: Settings, **environment: str) -> tuple[int, str]:
    said: list[str] = []
    with pytest.raises(PreflightFailed) as failed:
        prepare(given, said.append, host, environment)
    assert said
    assert all(line.startswith("error: ") for line in said)
    return failed.value.code, said[0]


def test_a_host_that_fits_is_left_alone() -> None:
    said: list[str] = []
    given = settings()
    assert prepare(given, said.append, Pretended(), {}) == given
    assert said == []


@pytest.mark.parametrize(
    ("host", "code", "words"),
    [
        (Pretended(unwritable="Permission denied"), Code.NOT_WRITABLE, "chown -R 10001"),
        (Pretended(found=[]), Code.NO_GPU, "NVIDIA Container Toolkit"),
        (Pretended(found=[replace(A100, driver="550.54.14")]), Code.DRIVER_TOO_OLD, "580 or newer"),
        (Pretended(found=[replace(A100, capability=(7, 5))]), Code.GPU_TOO_OLD, "compute capability 7.5"),
        (Pretended(found=[replace(A100, free=40 * GIB)]), Code.TOO_LITTLE_MEMORY, "utilization 0.48"),
        (Pretended(found=[replace(A100, total=GIB, free=GIB)]), Code.TOO_LITTLE_MEMORY, "smaller model"),
        (Pretended(answer=HubAnswer("gated", NOW)), Code.GATED_MODEL, "there is no token in HF_TOKEN"),
        (Pretended(written=NOW + 3600), Code.CLOCK, "3,600 seconds behind the last write"),
        (Pretended(answer=HubAnswer("ok", NOW - 900)), Code.CLOCK, "900 seconds ahead of"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_with_a_code_of_its_own(host: Host, code: Code, words: str) -> None:
    found, text = refusal(host, settings())
    assert (found, words in text) == (code, True), text


def test_a_length_that_fits_is_suggested_and_then_accepted() -> None:
    small = Pretended(found=[replace(A100, name="L4", total=22 * GIB, free=22 * GIB)])
    code, text = refusal(small, settings())
    assert code == Code.TOO_LITTLE_MEMORY
    advice = text.split("add ")[1].split(" to TANGRAM_ENGINE_ARGS")[0]
    assert advice.startswith("--max-model-len ")
    assert prepare(settings(engine_args=advice), print, small, {}).engine_args == advice
    over = f"--max-model-len {int(advice.split()[1]) + 2048}"
    assert refusal(small, settings(engine_args=over))[0] == Code.TOO_LITTLE_MEMORY


def test_a_lower_retention_lets_a_longer_conversation_fit() -> None:
    small = Pretended(found=[replace(A100, total=22 * GIB, free=22 * GIB)])
    assert prepare(settings(), print, small, {"TANGRAM_RETENTION": "0.1"}).model
    for arguments in ("--max-model-len auto", "--max-model-len 400k", "--kv-cache-memory-bytes 1000000000"):
        assert prepare(settings(engine_args=arguments), print, small, {}), "vLLM's to judge"


def test_a_token_that_is_not_enough_is_told_apart() -> None:
    text = refusal(Pretended(answer=HubAnswer("gated")), settings(), HF_TOKEN="hf_x")[1]
    assert "the token in HF_TOKEN may not read it" in text


def test_all_problems_are_said_and_the_first_one_gives_the_code() -> None:
    said: list[str] = []
    host = Pretended(unwritable="Read-only file system", found=[])
    with pytest.raises(PreflightFailed) as failed:
        prepare(settings(), said.append, host, {})
    assert (failed.value.code, len(said)) == (Code.NOT_WRITABLE, 2)


def test_warn_only_says_it_and_off_does_not_look() -> None:
    said: list[str] = []
    host = Pretended(found=[])
    assert prepare(settings(preflight="warn"), said.append, host, {}).model
    assert [line.split(":")[0] for line in said] == ["warning"]
    assert prepare(settings(preflight="off"), said.append, host, {}).model
    assert len(said) == 1


@pytest.mark.parametrize("given", [{"expect_gpu": False}, {"engine_url": "http://127.0.0.1:1"}])
def test_without_a_gpu_engine_of_ours_no_gpu_is_asked_for(given: dict[str, object]) -> None:
    host = Pretended(found=[])
    assert prepare(settings(**given), print, host, {})
    assert host.asked == []


def test_a_downloaded_model_needs_no_hub() -> None:
    host = Pretended(here=True)
    prepare(settings(), print, host, {})
    assert host.asked == []


@pytest.mark.parametrize(
    ("gib", "model", "length"),
    [
        (80, LARGE_MODEL, "32768"),
        (22.5, LARGE_MODEL, "32768"),
        (12, SMALL_MODEL, "32768"),
        (4.2, SMALL_MODEL, ""),
    ],
)
def test_a_model_that_fits_is_chosen_where_none_is_named(gib: float, model: str, length: str) -> None:
    memory = int(gib * GIB)
    said: list[str] = []
    host = Pretended(found=[replace(A100, total=memory, free=memory)])
    chosen = prepare(settings(model=""), said.append, host, {})
    assert chosen.model == model
    if length:
        assert chosen.engine_args == f" --max-model-len {length}"
    else:  # a short one, that fits
        assert 0 < int(chosen.engine_args.split()[1]) < 32768
    assert model in said[0]
    own = prepare(settings(model="", engine_args="--max-model-len 2048"), print, host, {})
    assert own.engine_args == "--max-model-len 2048"


def test_without_a_hub_the_bundled_model_is_served() -> None:
    said: list[str] = []
    chosen = prepare(settings(model=""), said.append, Pretended(answer=HubAnswer("unreachable")), {})
    assert chosen.model == ""
    assert "bundled model" in said[0]


# ---- the probes themselves ---------------------------------------------------------------------------


def test_gpus_are_read_from_the_driver_s_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771, 143256, 9.0, 580.95.05'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (gpu,) = Host().gpus()
    assert (gpu.name, gpu.total >> 20, gpu.capability) == ("NVIDIA H200", 143771, (9, 0))
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert Host().gpus() == []
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Host().gpus() == []


def test_a_folder_is_tried_by_writing(tmp_path: Path) -> None:
    assert Host().write_error(tmp_path / "new") == ""
    (tmp_path / "file").write_text("")
    assert Host().write_error(tmp_path / "file") != ""
    assert Host().last_write(tmp_path / "missing") == 0.0


@contextmanager
def hub_answering(status: int, **headers: str) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            del args

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "headers", "state"),
    [
        (200, {}, "ok"),
        (401, {"X_Error_Code": "GatedRepo"}, "gated"),
        (404, {}, "missing"),
        (500, {}, "unreachable"),
    ],
)
def test_the_hub_is_asked_once(status: int, headers: dict[str, str], state: str) -> None:
    code = "from app.preflight.probes import Host; a = Host().hub('o/m'); print(a.state, bool(a.clock))"
    with hub_answering(status, **headers) as url:
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
    assert done.stdout.split() == [state, "True"]
