"""Whatever a client sends that fits our OpenAPI description, or nearly so, gets an answer that fits it too.

Few examples of each route; more with TANGRAM_TEST_EXAMPLES=200.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.factory import build_services, create_app
from app.settings import Settings
from tests.app.conftest import _hash
from tests.fake_engine import FakeConfig, FakeEngine, ThreadServer
from tests.patience import PATIENCE

EXAMPLES = int(os.environ.get("TANGRAM_TEST_EXAMPLES", "5"))
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
FAMILIES = ("/v1/", "/api/", "/health/")
LEFT_OUT = {
    "DELETE /api/conversations/{conversation_id}",  # the others need what it would delete
    "POST /api/admin/calibration",  # these two begin minutes of work of the real model
    "POST /api/admin/calibration/resume",
}


@dataclass
class Target:
    """A running app. names: real ids for the parameters in paths, so that more is reached than 404."""

    url: str
    key: str
    schema: Any
    names: dict[str, str]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, bundled_model_dir: Path) -> Iterator[Target]:
    engine = FakeEngine(FakeConfig(model=str(bundled_model_dir), name="fake-model", token_seconds=0))
    with ThreadServer(engine.app) as engine_server:
        configured = Settings(
            home=tmp_path_factory.mktemp("home"), model=str(bundled_model_dir), engine_url=engine_server.url
        )
        services = build_services(configured)
        app = create_app(configured, services=services, chat_ui=False)
        with ThreadServer(app) as server:
            while not services.supervisor.status.ready:
                time.sleep(0.02)

            async def prepare() -> tuple[str, str]:
                user = await services.store.create_first_user("ann", _hash())
                key, _ = await services.accounts.create_api_key(user.id, "schema")
                return key, (await services.store.create_conversation(user.id)).id

            key, conversation = asyncio.run(prepare())
            said = httpx.post(
                f"{server.url}/api/conversations/{conversation}/messages",
                json={"content": "/tokens 9", "max_tokens": 5, "stream": False},
                headers={"Authorization": f"Bearer {key}"},
                timeout=PATIENCE,
            ).json()
            names = {
                "conversation_id": conversation,
                "message_id": said["user"]["id"],
                "reply_id": said["reply"]["id"],
            }
            yield Target(server.url, key, schemathesis.openapi.from_dict(app.openapi()), names)


def operations(target: Target) -> list[Any]:
    found = [operation.ok() for operation in target.schema.get_all_operations()]
    return [one for one in found if one.path.startswith(FAMILIES) and one.label not in LEFT_OUT]


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_fits_the_description(target: Target, mode: GenerationMode) -> None:
    seen: dict[str, set[int]] = {}
    for operation in operations(target):
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
            continue

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=EXAMPLES <= 5,
        )
        @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans())
        def check(case: Any, real: bool) -> None:
            for name in case.path_parameters or {} if real else ():
                case.path_parameters[name] = target.names.get(name, case.path_parameters[name])
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and real:
                case.body["model"] = "fake-model"
            answer = case.call(
                base_url=target.url, headers={"Authorization": f"Bearer {target.key}"}, timeout=2 * PATIENCE
            )
            seen.setdefault(case.operation.label, set()).add(answer.status_code)
            case.validate_response(answer, checks=CHECKS)

        check()
    assert len(seen) > 8
    if mode is GenerationMode.POSITIVE:
        succeeded = {label for label, codes in seen.items() if codes & {200, 201, 204}}
        assert {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models"} <= seen.keys()
        with_a_key = {label for label, codes in seen.items() if codes != {403}}  # the others want a sign-in
        assert len(with_a_key) > 35
        assert len(succeeded) >= len(with_a_key) / 2
