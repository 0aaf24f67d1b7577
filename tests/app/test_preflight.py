"""The look at the host: every finding, from probes put in its place, and the choice of a model."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from app.engine_settings import TUNED
from app.preflight.probes import Gpu, Host, HubAnswer
from app.preflight.problems import Code, PreflightFailed
from app.preflight.start import LARGE_MODEL, SMALL_MODEL, prepare
from app.preflight.stored import tuned
from app.settings import Settings
from db.database import Database
from db.store import Store
from tests.http_answers import answering
from tests.postgres_server import PostgresServer
from tests.tree import ROOT

GIB = 1 << 30
A100 = Gpu(0, "A100", 80 * GIB, 80 * GIB, (8, 0), "580.65.06")
NOW = 1_800_000_000.0


@dataclass
class Pretended(Host):
    """A host as a test describes it."""

    found: list[Gpu] = field(default_factory=lambda: [A100])
    unwritable: dict[str, tuple[int, str]] = field(default_factory=dict)
    taken: str = ""
    libraries: bool = True
    free: int = 256 * GIB
    written: float = 0.0
    answer: HubAnswer = field(default_factory=lambda: HubAnswer("ok", NOW))
    here: bool = False
    asked: list[str] = field(default_factory=list)

    def gpus(self) -> list[Gpu]:
        return self.found

    def write_error(self, folder: Path) -> tuple[int, str]:
        return self.unwritable.get(str(folder), (0, ""))

    def port_error(self, port: int) -> str:
        return self.taken

    def has_library(self, name: str) -> bool:
        return self.libraries

    def memory(self) -> tuple[int, int]:
        return self.free, self.free // 4

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


def unwritable(folder: str, number: int) -> Pretended:
    return Pretended(unwritable={folder: (number, os.strerror(number))})


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
        (unwritable("/data", errno.EACCES), Code.NOT_WRITABLE, "chown -R 10001"),
        (unwritable("/data", errno.ENOSPC), Code.NOT_WRITABLE, "make room"),
        (unwritable("/cache/hf", errno.EROFS), Code.NOT_WRITABLE, "/cache/hf cannot be written"),
        (unwritable("/cache", errno.EROFS), Code.NOT_WRITABLE, "mount it so"),
        (Pretended(taken="Address already in use"), Code.SETTING, "TANGRAM_METRICS_PORT"),
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
    where = {"HF_HOME": "/cache/hf", "XDG_CACHE_HOME": "/cache"}
    found, text = refusal(host, settings(metrics_port=9400), **where)
    assert (found, words in text) == (code, True), text


@pytest.mark.parametrize(
    ("second", "code", "words"),
    [
        ([], Code.NO_GPU, "TANGRAM_DATA_PARALLEL_SIZE asks for 2 engines, and 1 GPU is visible"),
        ([replace(A100, index=1, free=GIB)], Code.TOO_LITTLE_MEMORY, "has 1.0 of 80.0 GiB free"),
        ([replace(A100, index=1, capability=(7, 0))], Code.GPU_TOO_OLD, "compute capability 7.0"),
        ([replace(A100, index=1, total=GIB, free=GIB)], Code.TOO_LITTLE_MEMORY, "choose a smaller model"),
    ],
)
def test_every_gpu_that_is_asked_for_is_looked_at(second: list[Gpu], code: Code, words: str) -> None:
    host = Pretended(found=[A100, *second])
    found, text = refusal(host, settings(data_parallel_size=2))
    assert (found, words in text) == (code, True), text
    assert prepare(settings(), print, host, {}), "with one nobody looks at the second"
    assert prepare(settings(data_parallel_size=2), print, Pretended(found=[A100, replace(A100, index=1)]), {})


def test_engines_of_several_gpus_each_are_counted() -> None:
    given = settings(data_parallel_size=2, engine_args="--tensor-parallel-size 2")
    gpus = [replace(A100, index=index) for index in range(4)]
    assert prepare(given, print, Pretended(found=gpus), {})
    code, text = refusal(Pretended(found=gpus[:3]), given)
    assert code == Code.NO_GPU
    assert "2 GPUs (--tensor-parallel-size), TANGRAM_DATA_PARALLEL_SIZE asks for 2 engines" in text


def test_several_ranks_share_the_host_s_memory(tmp_path: Path) -> None:
    def asked(ranks: int) -> Settings:
        options = "--max-model-len 4096"
        return settings(expect_gpu=False, data_parallel_size=ranks, engine_args=options)

    host = Pretended(free=24 * GIB)
    assert prepare(asked(1), print, host, {}) == asked(1)
    code, text = refusal(host, asked(4))
    assert (code, "choose a smaller model" in text) == (Code.TOO_LITTLE_MEMORY, True), text


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.split("## Before the start")[1].split("\n## ")[0]
    documented = [int(found) for found in re.findall(r"^\| (\d+) \|", table, flags=re.M)]
    assert documented == [0, 1, *sorted(Code)]


def test_gpus_that_share_a_model_are_all_looked_at() -> None:
    small = replace(A100, name="L4", total=22 * GIB, free=22 * GIB)
    pair = settings(model="Qwen/Qwen3-14B", engine_args="--tensor-parallel-size 2 --max-model-len 8192")
    code, text = refusal(Pretended(found=[small]), pair)
    assert code == Code.NO_GPU
    assert "asks for 2 GPUs (--tensor-parallel-size), and 1 GPU is visible" in text
    two = Pretended(found=[small, replace(small, index=1)])
    assert prepare(pair, print, two, {}) == pair
    alone = settings(model="Qwen/Qwen3-14B", engine_args="--max-model-len 8192")
    assert refusal(two, alone)[0] == Code.TOO_LITTLE_MEMORY, "on one of them"
    busy = Pretended(found=[small, replace(small, index=1, name="busy", free=GIB)])
    assert refusal(busy, pair)[1].startswith("error: busy has 1.0 of 22.0 GiB free")
    large = settings(model="Qwen/Qwen3-32B", engine_args="-tp 2 --max-model-len 8192")
    assert "of 2 x L4 can be used" in refusal(two, large)[1]


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


async def test_what_the_console_has_stored_counts(tmp_path: Path) -> None:
    small = Pretended(found=[replace(A100, total=22 * GIB, free=22 * GIB)])
    here = settings().model_copy(update={"home": tmp_path})
    assert tuned(here.database_path) == {}
    assert refusal(small, here)[0] == Code.TOO_LITTLE_MEMORY
    here.make_folders()
    database = Database(here.database_path, here.backups_dir)
    database.migrate()
    assert tuned(here.database_path) == {}
    await Store(database).set_setting(TUNED, {"retention": 0.1, "alpha": 1.0})
    await database.aclose()
    assert tuned(here.database_path) == {"retention": 0.1, "alpha": 1.0}
    assert prepare(here, print, small, {"TANGRAM_RETENTION": "1.0"}).model, "as the engine is started"
    here.database_path.write_bytes(b"no database")
    assert tuned(here.database_path) == {}


async def test_with_postgresql_an_old_file_does_not_count(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    small = Pretended(found=[replace(A100, total=22 * GIB, free=22 * GIB)], written=NOW + 1e6)
    file = settings(database_url="").model_copy(update={"home": tmp_path})
    file.make_folders()
    url = postgres_server.emptied()
    here = file.model_copy(update={"database_url": postgres_server.text(url.database)})
    for place, values in ((None, {"retention": 0.1}), (url, {"retention": 1.0})):
        database = Database(file.database_path, file.backups_dir, place)
        database.migrate()
        await Store(database).set_setting(TUNED, values)
        await database.aclose()
    assert refusal(small, here)[0] == Code.TOO_LITTLE_MEMORY, "neither the file's tuning nor its last write"
    assert tuned(here.database_path, url) == {"retention": 1.0}
    assert tuned(here.database_path, replace(url, port=1)) == {}
    await asyncio.to_thread(postgres_server.execute, "DELETE FROM settings", database=url.database)
    assert tuned(here.database_path, url) == {}


def test_a_token_that_is_not_enough_is_told_apart() -> None:
    text = refusal(Pretended(answer=HubAnswer("gated")), settings(), HF_TOKEN="hf_x")[1]
    assert "the token in HF_TOKEN may not read it" in text


def test_all_problems_are_said_and_the_first_one_gives_the_code() -> None:
    said: list[str] = []
    host = unwritable("/data", errno.EROFS)
    host.found = []
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


def test_an_engine_elsewhere_has_its_own_gpu_model_and_caches() -> None:
    host = unwritable("/cache", errno.EROFS)
    host.found, host.answer = [], HubAnswer("gated")
    given = settings(engine_url="http://127.0.0.1:1")
    assert prepare(given, print, host, {"XDG_CACHE_HOME": "/cache"}) == given
    assert host.asked == []


def test_without_a_gpu_the_model_and_the_clock_are_still_looked_at() -> None:
    given = settings(expect_gpu=False)
    assert prepare(given, print, Pretended(found=[]), {}) == given
    assert refusal(Pretended(found=[], answer=HubAnswer("gated")), given)[0] == Code.GATED_MODEL
    assert refusal(Pretended(found=[], answer=HubAnswer("ok", NOW + 900)), given)[0] == Code.CLOCK


def test_memory_without_a_gpu() -> None:
    given = settings(expect_gpu=False, engine_args="--max-model-len 8192")
    laptop = Pretended(found=[], free=16 * GIB)
    assert prepare(given, print, laptop, {}) == given
    code, text = refusal(replace(laptop, free=8 * GIB), given)
    assert (code, "needs about 7.5 GiB and its cache 2.0" in text) == (Code.TOO_LITTLE_MEMORY, True), text
    code, text = refusal(laptop, settings(expect_gpu=False))  # 262,144 tokens
    assert (code, "--max-model-len" in text) == (Code.TOO_LITTLE_MEMORY, True)
    advice = text.split("add ")[1].split(" to TANGRAM_ENGINE_ARGS")[0]
    assert prepare(settings(expect_gpu=False, engine_args=advice), print, laptop, {})
    assert refusal(laptop, given, VLLM_CPU_KVCACHE_SPACE="12")[0] == Code.TOO_LITTLE_MEMORY
    for left in ({"VLLM_CPU_KVCACHE_SPACE": "many"}, {}):
        words = "" if left else "--kv-cache-memory-bytes 1000000"
        assert prepare(settings(expect_gpu=False, engine_args=words), print, laptop, left), (
            "the engine's to judge"
        )
    assert all(0 < size < 2**50 for size in Host().memory())


def test_the_cpu_build_s_library_is_looked_for() -> None:
    bare = Pretended(libraries=False)
    code, text = refusal(bare, settings(expect_gpu=False))
    assert (code, "apt-get install libnuma1" in text) == (Code.MISSING_LIBRARY, True)
    assert prepare(settings(), print, bare, {}) == settings()  # the CUDA build is not this one
    assert prepare(settings(expect_gpu=False, engine_command="other"), print, bare, {})
    assert Host().has_library("libc.so.6")
    assert not Host().has_library("libnowhere.so.1")


def test_models_that_were_carried_here_may_lie_read_only() -> None:
    host = unwritable("/models", errno.EROFS)
    host.here = True
    assert prepare(settings(), print, host, {"HF_HOME": "/models", "HF_HUB_OFFLINE": "1"})
    assert refusal(host, settings(), HF_HOME="/models")[0] == Code.NOT_WRITABLE
    bundled = unwritable("/data/models", errno.EROFS)
    assert prepare(settings(expect_gpu=False), print, bundled, {})
    assert refusal(bundled, settings(expect_gpu=False, model=""))[0] == Code.NOT_WRITABLE


OLD = replace(A100, capability=(7, 0), index=1, uuid="GPU-1b2c")


@pytest.mark.parametrize(
    ("visible", "code"),
    [
        (None, None),
        ("0,1", None),
        ("1,0", Code.GPU_TOO_OLD),
        ("GPU-1b", Code.GPU_TOO_OLD),
        ("", Code.NO_GPU),
        ("-1", Code.NO_GPU),
        ("7,0", Code.NO_GPU),
        ("MIG-1", None),
    ],
)
def test_the_gpu_that_the_engine_will_see_is_looked_at(visible: str | None, code: Code | None) -> None:
    host = Pretended(found=[A100, OLD])
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if code is None:
        assert prepare(settings(), print, host, environment) == settings()
    else:
        assert refusal(host, settings(), **environment)[0] == code


@pytest.mark.parametrize("model", ["", "Qwen/Qwen3-4B-Instruct-2507"])
def test_a_card_that_shares_the_host_s_memory_is_left_to_vllm(model: str) -> None:
    host = Pretended(found=[replace(A100, total=0, free=0)])
    assert prepare(settings(model=model), print, host, {}) == settings(model=model)


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
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771, 143256, 9.0, 580.95.05, GPU-a1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (gpu,) = Host().gpus()
    assert (gpu.name, gpu.total >> 20, gpu.capability) == ("NVIDIA H200", 143771, (9, 0))
    assert gpu.uuid == "GPU-a1"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA GB10, [N/A], [N/A], 12.1, 580.95.05, GPU-a1'\n")
    assert Host().gpus()[0].total == 0
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert Host().gpus() == []
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Host().gpus() == []


def test_a_folder_is_tried_by_writing(tmp_path: Path) -> None:
    assert Host().write_error(tmp_path / "new") == (0, "")
    (tmp_path / "file").write_text("")
    assert Host().write_error(tmp_path / "file") == (errno.EEXIST, "File exists")
    assert Host().last_write(tmp_path / "missing") == 0.0


def test_a_port_is_tried_by_listening() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert Host().port_error(port) == "Address already in use"
    assert Host().port_error(port) == ""


@pytest.mark.parametrize(
    ("status", "headers", "state"),
    [
        (200, {}, "ok"),
        (401, {"X-Error-Code": "GatedRepo"}, "gated"),
        (404, {}, "missing"),
        (500, {}, "unreachable"),
    ],
)
def test_the_hub_is_asked_once(status: int, headers: dict[str, str], state: str) -> None:
    code = "from app.preflight.probes import Host; a = Host().hub('o/m'); print(a.state, bool(a.clock))"
    with answering(status, headers) as port:
        hub = f"http://127.0.0.1:{port}"
        environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
    assert done.stdout.split() == [state, "True"]
