"""The port for Prometheus, and the files that make Prometheus and Grafana use it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from app.errors import EngineNotReady
from app.managed_engine import free_port
from app.metrics import Metrics
from app.metrics_listener import metrics_port
from app.remote_engine import RemoteEngine
from app.settings import Settings
from tangram.errors import EngineUnavailable
from tests.patience import PATIENCE
from tests.tree import ROOT

DOCKER = ROOT / "docker"


class Engine:
    """Answers, or not."""

    up = True

    async def memory(self) -> dict[str, Any]:
        return {"pool": {"total_pages": 7}}

    async def metrics_text(self) -> str:
        if not self.up:
            raise EngineUnavailable("gone")
        return "tangram_up 1.0\n"


def services(tmp_path: Path, port: int) -> Any:
    settings = Settings(home=tmp_path, metrics_port=port)
    return SimpleNamespace(settings=settings, metrics=Metrics(RemoteEngine(settings)), engine=Engine())


async def test_prometheus_gets_both_pages_and_nothing_else(tmp_path: Path) -> None:
    made = services(tmp_path, free_port())
    url = f"http://127.0.0.1:{made.settings.metrics_port}"
    async with metrics_port(made), httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE) as http:
        own = await http.get("/metrics")
        assert 'tangram_chat_pool_pages{kind="total"} 7.0' in own.text
        assert own.headers["content-type"].startswith("text/plain")
        assert (await http.get("/engine")).text == "tangram_up 1.0\n"
        made.engine.up = False
        assert (await http.get("/engine")).status_code == 503
        assert (await http.get("/api/conversations")).status_code == 404
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


async def test_an_engine_that_is_not_ready_leaves_the_app_s_page(tmp_path: Path) -> None:
    class Starting:
        def __getattr__(self, name: str) -> Any:
            raise EngineNotReady("starting")

    made = services(tmp_path, free_port())
    made.engine = Starting()
    url = f"http://127.0.0.1:{made.settings.metrics_port}"
    async with metrics_port(made), httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE) as http:
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/engine")).status_code == 503


async def test_without_a_port_nothing_listens_and_a_taken_one_is_an_error(tmp_path: Path) -> None:
    async with metrics_port(services(tmp_path, 0)):
        pass
    with socket.create_server(("", 0)) as taken, pytest.raises(OSError, match="in use"):
        async with metrics_port(services(tmp_path, taken.getsockname()[1])):
            pass


def test_first_tokens_are_told_apart_by_what_was_in_the_cache(tmp_path: Path) -> None:
    metrics = Metrics(RemoteEngine(Settings(home=tmp_path)))
    for cached in (0, None, 300):
        metrics.reply_ended("complete", {"ttft_ms": 100, "cached_tokens": cached})
    text = metrics.text().decode()
    assert 'tangram_chat_time_to_first_token_seconds_count{turn="read"} 2.0' in text
    assert 'tangram_chat_time_to_first_token_seconds_count{turn="resumed"} 1.0' in text


def documented() -> set[str]:
    """Metrics of the tables in docs/operations.md, which other tests compare with those that exist."""
    return set(re.findall(r"^\| `(tangram_\w+)", (ROOT / "docs" / "operations.md").read_text(), flags=re.M))


def expressions() -> list[str]:
    dashboard = json.loads((DOCKER / "grafana" / "dashboards" / "tangram.json").read_text())
    alerts = yaml.safe_load((DOCKER / "prometheus" / "alerts.yml").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return found + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


def test_dashboard_and_alerts_ask_for_metrics_that_exist() -> None:
    for expression in expressions():
        for name in re.findall(r"tangram_\w+", expression):
            assert re.sub(r"_(bucket|sum|count)$", "", name) in documented(), name


def test_the_dashboard_shows_what_it_should_from_the_source_that_is_provisioned() -> None:
    dashboard = json.loads((DOCKER / "grafana" / "dashboards" / "tangram.json").read_text())
    (source,) = yaml.safe_load(
        (DOCKER / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
    )["datasources"]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}
    every = " ".join(expressions())
    for name in ("tangram_pages", "conversations_resident", "sum by (le, turn)", "tangram_takeovers_total"):
        assert name in every
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_prometheus_scrapes_the_port_that_compose_sets() -> None:
    compose = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "docker-compose.yml").read_text()))
    port = compose["services"]["tangram-chat"]["environment"]["TANGRAM_METRICS_PORT"]
    jobs = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert {job["metrics_path"] for job in jobs} == {"/metrics", "/engine"}
    targets = [target for job in jobs for one in job["static_configs"] for target in one["targets"]]
    assert set(targets) == {f"app:{port}"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here (Debian: package prometheus)")
def test_prometheus_own_tool_accepts_the_files() -> None:
    command = ["promtool", "check", "config", str(DOCKER / "prometheus" / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
