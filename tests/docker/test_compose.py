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


def compose_command() -> list[str] | None:
    """The docker-compose of this machine: the plugin, the older program, or None."""
    if shutil.which("docker"):
        plugin = ["docker", "compose"]
        if subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode == 0:
            return plugin
    return ["docker-compose"] if shutil.which("docker-compose") else None


def rendered(values: dict[str, str]) -> dict[str, Any]:
    """The file with ${NAME:-default} filled in, read as YAML."""

    def value(match: re.Match[str]) -> str:
        return values.get(match[1]) or match[2]

    text = re.sub(r"\$\{(\w+):-([^}]*)\}", value, COMPOSE.read_text())
    assert "${" not in text, "every variable has a default"
    return dict(yaml.safe_load(text))


@pytest.fixture
def service() -> dict[str, Any]:
    return dict(rendered({})["services"]["tangram-chat"])


def test_docker_compose_accepts_it() -> None:
    command = compose_command()
    if command is None:
        pytest.skip("no docker-compose here (Debian: apt-get install docker-compose)")
    result = subprocess.run([*command, "config"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    accepted = yaml.safe_load(result.stdout)["services"]["tangram-chat"]
    (device,) = accepted["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert accepted["healthcheck"]["test"] == ["CMD", "python", "/opt/healthcheck.py"]


def test_a_gpu_is_reserved_and_can_be_chosen() -> None:
    def devices(values: dict[str, str]) -> Any:
        service = rendered(values)["services"]["tangram-chat"]
        return service["deploy"]["resources"]["reservations"]["devices"]

    assert devices({}) == [{"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}]
    assert devices({"TANGRAM_GPU": "3"})[0]["device_ids"] == ["3"]


def test_only_the_app_is_published_and_only_to_this_machine(service: dict[str, Any]) -> None:
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert "network_mode" not in service
    assert "privileged" not in service
    assert service["cap_drop"] == ["ALL"]


def test_it_keeps_its_data_in_named_volumes(service: dict[str, Any]) -> None:
    mounts = dict(volume.split(":") for volume in service["volumes"])
    assert set(mounts.values()) == {"/data", "/data/cache", "/data/models"}
    assert set(mounts) == set(rendered({})["volumes"])


def test_it_comes_back_by_itself_and_bounds_what_it_logs(service: dict[str, Any]) -> None:
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["start_period"] == "15m"
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert service["shm_size"] == "2gb"
    assert service["stop_grace_period"] == "30s"


def test_the_image_has_the_version(service: dict[str, Any]) -> None:
    assert service["image"] == f"tangram-chat:{PROJECT['version']}"


def test_the_example_names_every_variable_and_its_default() -> None:
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE.read_text()))
    lines = [line for line in (ROOT / ".env.example").read_text().splitlines() if line]
    example = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert example == used


def test_the_model_and_engine_options_reach_the_container_as_they_are() -> None:
    arguments = "--max-model-len 8192 --override-generation-config " + json.dumps({"a": 1})
    command = compose_command()
    if command is None:
        pytest.skip("no docker-compose here (Debian: apt-get install docker-compose)")
    result = subprocess.run(
        [*command, "config"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", "MODEL": "org/model", "TANGRAM_ENGINE_ARGS": arguments},
        capture_output=True,
        text=True,
        check=True,
    )
    environment = yaml.safe_load(result.stdout)["services"]["tangram-chat"]["environment"]
    assert (environment["MODEL"], environment["TANGRAM_ENGINE_ARGS"]) == ("org/model", arguments)
