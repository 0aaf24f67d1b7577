"""`tangram serve`: the command that it turns into, and what it refuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from tangram import cli, host, hub
from tangram.config import KEY, TangramConfig
from tangram.errors import ConfigError, Unreachable
from tangram.naming import as_asked, option

WORKER = ["--worker-cls", "tangram.cpu_worker.TangramCPUWorker"]


def after(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_the_command_is_stock_vllm_s_server_with_our_options_and_the_user_s() -> None:
    config = TangramConfig(retention=0.25, page_tokens=32)
    command = cli.vllm_command("some/model", config, ["--port", "9", "--enforce-eager"], on_cpu=False)
    assert command[1:3] == ["-m", "tangram.launch"]
    assert after(command, "--model") == "some/model"
    assert after(command, "--block-size") == "32"
    assert after(command, "--attention-backend") == "CUSTOM"
    assert json.loads(after(command, "--additional-config"))[KEY] == config.to_dict()
    assert command[5:8] == ["--port", "9", "--enforce-eager"], "ours come last, and win"


def test_what_is_polled_stays_out_of_the_log_unless_the_user_decides() -> None:
    command = cli.vllm_command("m", TangramConfig(), [], on_cpu=True)
    assert after(command, "--disable-access-log-for-endpoints") == ",".join(
        ["/health", "/metrics", "/tangram/memory", "/tangram/status", "/tangram/profile"]
    )
    command = cli.vllm_command("m", TangramConfig(), ["--disable-uvicorn-access-log"], on_cpu=True)
    assert "--disable-access-log-for-endpoints" not in command


def test_on_a_cpu_the_cache_gets_a_size_unless_the_user_gave_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    command = cli.vllm_command("m", TangramConfig(), [], on_cpu=True)
    assert host.LEAST <= int(after(command, "--kv-cache-memory-bytes")) <= host.MOST
    assert "--attention-backend" not in command
    assert cli.cpu_options(["--gpu-memory-utilization=0.3"], {}) == ["--enforce-eager", *WORKER]
    assert cli.cpu_options(["--kv-cache-memory-bytes", "1"], {}) == ["--enforce-eager", *WORKER]
    assert cli.cpu_options([], {"VLLM_CPU_KVCACHE_SPACE": "2"}) == ["--enforce-eager", *WORKER]


@pytest.mark.parametrize("option", ["--enforce-eager", "--no-enforce-eager", "--compilation-config={}"])
def test_on_a_cpu_nothing_is_compiled_unless_the_user_decides(option: str) -> None:
    sized = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    assert cli.cpu_options([], sized) == ["--enforce-eager", *WORKER]
    assert cli.cpu_options([option], sized) == WORKER
    assert cli.cpu_options([option, "--worker-cls", "their.own"], sized) == []


def test_the_cache_s_share_follows_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, expected in ((0, host.LEAST), (8 * host.GIB, 2 * host.GIB), (1024 * host.GIB, host.MOST)):
        monkeypatch.setattr(host, "available_memory", lambda free=free: free)
        assert host.cpu_cache_bytes() == expected


@pytest.mark.parametrize("extra", [["--data-parallel-size", "4"], ["--data_parallel_size=4"], ["-dp=4"]])
def test_engines_share_the_host_s_memory(extra: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 32 * host.GIB)
    assert after(cli.cpu_options([], {}), "--kv-cache-memory-bytes") == str(8 * host.GIB)
    assert after(cli.cpu_options(extra, {}), "--kv-cache-memory-bytes") == str(2 * host.GIB)
    assert "--data-parallel-size" not in cli.cpu_options(["-dp", "many"], {}), "that is vLLM's to refuse"
    command = cli.vllm_command("m", TangramConfig(), extra, on_cpu=True)
    assert [word for word in command if word in extra] == extra


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 8388608 kB",
        "/sys/fs/cgroup/memory.max": str(3 * host.GIB),
        "/sys/fs/cgroup/memory.current": str(host.GIB),
    }
    monkeypatch.setattr(host, "_read", lambda path: files[path])
    assert host.available_memory() == 2 * host.GIB
    files["/sys/fs/cgroup/memory.max"] = "max"
    assert host.available_memory() == 8 * host.GIB


@pytest.mark.parametrize("extra", [["--additional-config", '{"a": 1}'], ['--additional_config={"a": 1}']])
def test_the_user_s_additional_config_is_kept(extra: list[str]) -> None:
    command = cli.vllm_command("m", TangramConfig(), extra, on_cpu=True)
    assert set(json.loads(after(command, "--additional-config"))) == {"a", KEY}
    assert sum(word.startswith(("--additional-config", "--additional_config")) for word in command) == 1


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--block-size", "128"], "page_tokens: is 16; use --tangram-page-tokens"),
        (["--block-size=128"], "page_tokens: is 16; use --tangram-page-tokens"),
        (["--attention-backend", "FLASH_ATTN"], "--attention-backend: is set by tangram serve"),
        (["--scheduler-cls=x"], "--scheduler-cls: is set by tangram serve"),
        (["--block_size", "128"], "page_tokens: is 16; use --tangram-page-tokens"),
        (["--scheduler_cls=x"], "--scheduler-cls: is set by tangram serve"),
        (["--additional-config", "{"], "--additional-config: must be a JSON object"),
        (["--additional-config", "[]"], "--additional-config: must be a JSON object"),
        (["--additional-config.a", "1"], "--additional-config: must be one JSON object"),
    ],
)
def test_options_that_contradict_ours_are_refused(extra: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        cli.vllm_command("m", TangramConfig(), extra, on_cpu=True)
    assert str(error.value).startswith(says)


def test_the_plugin_is_named_beside_all_that_loaded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.vllm_environment({"VLLM_PLUGINS": "one,two"})["VLLM_PLUGINS"] == "one,two,tangram"
    assert cli.vllm_environment({"VLLM_PLUGINS": "tangram"})["VLLM_PLUGINS"] == "tangram"
    assert "tangram" in cli.vllm_environment({})["VLLM_PLUGINS"].split(",")
    assert cli.vllm_environment({"A": "b"})["A"] == "b"


def test_ranks_on_a_cpu_share_memory_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 16 << 30)
    for two in (["-tp", "2"], ["--tensor-parallel-size=2"], ["--tensor_parallel_size", "2"]):
        assert cli.ranks_of(two) == 2
        assert cli.cpu_options(two, {})[:2] == ["--kv-cache-memory-bytes", str(2 << 30)]
    assert cli.cpu_options([], {})[:2] == ["--kv-cache-memory-bytes", str(4 << 30)]
    assert cli.ranks_of(["-tp", "two"]) == cli.ranks_of(["-tp"]) == cli.ranks_of([]) == 1, "vLLM's to judge"
    assert host.cpu_threads(2, [0, 1, 4, 5, 6], nodes=1) == "0,1|4,5"
    assert host.cpu_threads(4, [0, 1], nodes=1) == "nobind"
    assert host.cpu_threads(2, [0, 1], nodes=2) is None, "vLLM gives each rank a memory node"
    monkeypatch.setattr(cli, "memory_nodes", lambda: 1)
    monkeypatch.setattr(cli.os, "sched_getaffinity", lambda _: {3, 2})
    assert cli.vllm_environment({}, 2)[cli.THREADS_VARIABLE] == "2|3"
    assert cli.vllm_environment({cli.THREADS_VARIABLE: "0|1"}, 2)[cli.THREADS_VARIABLE] == "0|1"
    assert cli.THREADS_VARIABLE not in cli.vllm_environment({}, 1)
    assert host.memory_nodes() >= 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "/no/such/model"], "MODEL: there is no directory /no/such/model"),
        (["serve", "~/no/such"], f"MODEL: there is no directory {Path.home()}/no/such"),
        (["serve", "m", "--tangram-retention", "2"], "--tangram-retention: must be above 0 and at most 1"),
        (["serve", "m", "--tangram_page_tokens=3"], "--tangram-page-tokens: must be a power of two"),
        (["serve", "m", "--tangram-retension", "1"], "--tangram-retension: is no option of tangram serve"),
        (["serve"], "the following arguments are required: MODEL"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_mistakes_end_with_status_2_and_a_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(arguments)
    except SystemExit as exit_:
        status = exit_.code  # type: ignore[assignment]
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2
    assert line.startswith(f"tangram: error: {says}")


def test_the_module_runs_and_names_a_bad_variable_as_it_was_set() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tangram", "serve", "m"],
        capture_output=True,
        text=True,
        env=os.environ | {"TANGRAM_RESIDENT_SHARE": "3"},
    )
    assert run.returncode == 2
    assert run.stderr == "tangram: error: TANGRAM_RESIDENT_SHARE: must be above 0 and at most 1, not 3.0\n"


def test_a_setting_is_named_by_the_source_that_counts() -> None:
    error = ConfigError("page_tokens", "must be page_tokens: at last")
    both = {"TANGRAM_PAGE_TOKENS": "3"}
    assert str(as_asked(error, ["page_tokens"], both)).startswith(
        "--tangram-page-tokens: must be page_tokens:"
    )
    assert str(as_asked(error, [], both)).startswith("TANGRAM_PAGE_TOKENS: must be page_tokens:")
    assert str(as_asked(error, [], {})).startswith("--tangram-page-tokens: ")
    assert as_asked(error, [], both).field == "page_tokens"
    other = ConfigError("MODEL", "is none")
    assert as_asked(other, [], both) is other


def test_a_variable_that_an_option_overrides_does_not_reach_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda path, command, environment: started.append(environment))
    monkeypatch.setenv("TANGRAM_SINK", "1")
    monkeypatch.setenv("TANGRAM_ALPHA", "2")
    cli.main(["serve", str(tmp_path), "--tangram-sink", "2"])
    assert "TANGRAM_SINK" not in started[0]
    assert started[0]["TANGRAM_ALPHA"] == "2"


def test_threads_on_a_cpu_are_shared_out_over_all_engines_and_their_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda path, command, environment: started.append(environment))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(cli, "memory_nodes", lambda: 1)
    monkeypatch.delenv(cli.THREADS_VARIABLE, raising=False)
    cli.main(["serve", str(tmp_path), "-dp", "2", "-tp", "2"])
    cli.main(["serve", str(tmp_path), "--data-parallel-size", "2"])
    assert [one[cli.THREADS_VARIABLE] for one in started] == ["0,1|2,3|4,5|6,7", "0,1,2,3|4,5,6,7"]


def test_the_home_directory_is_spelled_out_for_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert after(cli.vllm_command("~/model", TangramConfig(), [], True), "--model") == str(tmp_path / "model")


def test_a_name_that_nobody_knows_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as closed:  # bound and not listening: it turns callers away
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
        for name in ("models/nope", "nope"):
            with pytest.raises(Unreachable) as error:
                hub.check_reachable(name, None, {})
            assert f"MODEL: {name} is neither a directory nor a model that the hub gives us" in str(
                error.value
            )
            assert f"{endpoint} does not answer" in str(error.value)
        for name in (str(tmp_path), "s3://bucket/model", "three/part/name"):
            hub.check_reachable(name, None, {})
        hub.check_reachable("models/nope", None, {"VLLM_USE_MODELSCOPE": "True"})
        monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
            hub.check_reachable("models/nope", None, {})
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: "/there/config.json")
        hub.check_reachable("models/downloaded", None, {})


def test_flags_are_off_and_not_false_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.build_parser().parse_args(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default off)" in text
    assert "(default False)" not in text
    assert "(default 1.0)" in text, "which equals True"


def test_every_setting_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.build_parser().parse_args(["serve", "--help"])
    text = capsys.readouterr().out
    for name in TangramConfig().to_dict():
        assert option(name) in text


def test_the_client_s_side_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, tangram.client, tangram.geometry, tangram.errors;"
        "sys.exit(bool({'torch', 'vllm', 'kernels'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_a_hub_that_does_not_answer_is_worth_another_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(model: str, revision: str | None) -> None:
        raise Unreachable("MODEL", f"{model}: the hub does not answer")

    monkeypatch.setattr(cli, "check_reachable", silent)
    assert cli.main(["serve", "some/model"]) == cli.FAILURE
    assert capsys.readouterr().err == "tangram: error: MODEL: some/model: the hub does not answer\n"


def test_a_spelling_of_vllm_s_does_not_replace_our_settings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = cli.vllm_command("m", TangramConfig(retention=0.25), ["--additional-conf", '{"x": 1}'], True)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(command[3:])
    assert TangramConfig.from_additional_config(parsed.additional_config).retention == 0.25
