"""docker-compose.yml: accepted by the tool, and with the properties that a deployment relies on."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.tree import PROJECT, ROOT

COMPOSE = ROOT / "docker-compose.yml"
PROFILES = ["cpu", "gpus", "monitoring", "proxy"]
APPS = ["tangram-chat", "gpus", "cpu"]


def compose_command() -> list[str] | None:
    """The docker-compose of this machine: the plugin, the older program, or None."""
    if shutil.which("docker"):
        plugin = ["docker", "compose"]
        if subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode == 0:
            return plugin
    return ["docker-compose"] if shutil.which("docker-compose") else None


def config(*options: str, **variables: str) -> dict[str, Any]:
    """What the tool makes of the file."""
    command = compose_command()
    if command is None:
        pytest.skip("no docker-compose here (Debian: apt-get install docker-compose)")
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", **variables}
    result = subprocess.run(
        [*command, *options, "config"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return dict(yaml.safe_load(result.stdout))


def rendered(values: dict[str, str]) -> dict[str, Any]:
    """The file with ${NAME:-default} filled in, read as YAML."""

    def value(match: re.Match[str]) -> str:
        return values.get(match[1]) or match[2]

    text = re.sub(r"\$\{(\w+):-([^}]*)\}", value, COMPOSE.read_text())
    assert "${" not in text, "every variable has a default"
    return dict(yaml.safe_load(text))


def services() -> dict[str, dict[str, Any]]:
    return dict(rendered({})["services"])


@pytest.mark.parametrize("profile", PROFILES)
def test_docker_compose_accepts_every_profile(profile: str) -> None:
    accepted = config("--profile", profile)["services"]
    wanted = {name for name, one in services().items() if one.get("profiles", [profile]) == [profile]}
    assert wanted <= accepted.keys()


def test_docker_compose_accepts_it_without_any() -> None:
    accepted = config()["services"]["tangram-chat"]
    (device,) = accepted["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert accepted["healthcheck"]["test"] == ["CMD", "python", "/opt/healthcheck.py"]


def test_a_gpu_is_reserved_and_can_be_chosen() -> None:
    def devices(values: dict[str, str]) -> Any:
        service = rendered(values)["services"]["tangram-chat"]
        return service["deploy"]["resources"]["reservations"]["devices"]

    assert devices({}) == [{"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}]
    assert devices({"TANGRAM_GPU": "3"})[0]["device_ids"] == ["3"]
    assert "reservations" not in services()["cpu"]["deploy"]["resources"]


def test_several_gpus_are_reserved_by_their_number() -> None:
    def gpus(values: dict[str, str]) -> Any:
        return rendered(values)["services"]["gpus"]

    (device,) = gpus({})["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    two = gpus({"TANGRAM_GPUS": "2", "TANGRAM_DATA_PARALLEL_SIZE": "2"})
    assert two["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 2
    assert two["environment"]["TANGRAM_DATA_PARALLEL_SIZE"] == 2
    one = services()["tangram-chat"]
    assert {name: value for name, value in one.items() if name != "deploy"} == {
        name: value for name, value in gpus({}).items() if name not in ("deploy", "profiles")
    }


def test_docker_compose_accepts_a_number_of_gpus() -> None:
    found = config("--profile", "gpus", TANGRAM_GPUS="2")["services"]["gpus"]
    assert found["deploy"]["resources"]["reservations"]["devices"][0]["count"] in (2, "2")


def test_nothing_but_the_app_starts_by_itself_and_it_is_published_to_this_machine_only() -> None:
    assert [name for name, one in services().items() if "profiles" not in one] == ["tangram-chat"]
    for name in APPS:
        assert services()[name]["ports"] == ["127.0.0.1:8000:8000"]
    assert services()["grafana"]["ports"] == ["127.0.0.1:3000:3000"]
    assert "ports" not in services()["prometheus"]


@pytest.mark.parametrize("name", [*APPS, "prometheus", "grafana", "caddy"])
def test_every_service_is_hardened_bounded_and_comes_back_by_itself(name: str) -> None:
    one = services()[name]
    assert one["read_only"] is True
    assert one["cap_drop"] == ["ALL"]
    assert one["security_opt"] == ["no-new-privileges:true"]
    assert one["restart"] == "unless-stopped"
    assert "privileged" not in one
    assert "network_mode" not in one
    assert set(one["logging"]["options"]) == {"max-size", "max-file"}
    assert one["deploy"]["resources"]["limits"]["memory"]
    tag = one["image"].rpartition(":")[2]
    assert re.search(r"\d+\.\d+", tag), one["image"]


@pytest.mark.parametrize("name", APPS)
def test_the_app_keeps_its_data_in_named_volumes(name: str) -> None:
    mounts = dict(volume.split(":") for volume in services()[name]["volumes"])
    assert set(mounts.values()) == {"/data", "/data/cache", "/data/models"}
    assert set(mounts) <= set(rendered({})["volumes"])


def test_what_is_mounted_from_the_tree_exists() -> None:
    for one in services().values():
        for volume in one["volumes"]:
            if volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).exists(), volume


def test_the_app_has_time_to_load_and_to_stop() -> None:
    one = services()["tangram-chat"]
    assert one["healthcheck"]["start_period"] == "15m"
    assert one["shm_size"] == "2gb"
    assert one["stop_grace_period"] == "30s"
    assert any(entry.startswith("/tmp") and "exec" in entry for entry in one["tmpfs"])


@pytest.mark.parametrize("name", APPS)
def test_the_image_has_the_version(name: str) -> None:
    assert services()[name]["image"].endswith(f":{PROJECT['version']}")


def test_the_proxy_is_the_one_that_the_app_believes() -> None:
    address = services()["caddy"]["networks"]["inside"]["ipv4_address"]
    assert services()["tangram-chat"]["environment"]["TANGRAM_TRUSTED_PROXIES"] == address
    assert services()["tangram-chat"]["networks"]["inside"]["aliases"] == ["app"]


def test_the_example_names_every_variable_and_its_default() -> None:
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE.read_text()))
    lines = [line for line in (ROOT / ".env.example").read_text().splitlines() if line]
    example = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert example == used


def test_the_model_and_engine_options_reach_the_container_as_they_are() -> None:
    arguments = "--max-model-len 8192 --override-generation-config " + json.dumps({"a": 1})
    found = config(MODEL="org/model", TANGRAM_ENGINE_ARGS=arguments)
    environment = found["services"]["tangram-chat"]["environment"]
    assert (environment["MODEL"], environment["TANGRAM_ENGINE_ARGS"]) == ("org/model", arguments)
