"""The real supervisor and engine from one model to another, and back when a third one does not come up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.engine_change import MODEL
from app.probe import probed_text
from app.settings import Settings
from tests.app.conftest import Product, running_product
from tests.tiny_models import random_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
OPTIONS = "--max-model-len 2048 --kv-cache-memory-bytes 100000000 --max-num-seqs 2 --dtype float32"


async def answer(product: Product) -> str:
    """What the served model says, greedily: random weights say something of their own."""
    body = {
        "model": product.services.supervisor.status.model,
        "messages": [{"role": "user", "content": "Say something."}],
        "temperature": 0,
        "max_tokens": 12,
    }
    key, _ = await product.services.accounts.create_api_key(product.owner, "test")
    headers = {"authorization": f"Bearer {key}"}
    found = await product.http.post("/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["message"]["content"])


async def switch(product: Product, model: Path) -> tuple[str | None, str]:
    """How a switch ended, as the console's tab Engine begins and tells it."""
    services = product.services

    async def work() -> str:
        await services.engine_settings.use_model(product.owner, str(model))
        return probed_text(services.engine_settings.probed)

    services.changes.start(MODEL, model.name, work)
    await services.changes.wait()
    change = services.changes.last(MODEL)
    assert change is not None
    return change.outcome, change.message


async def test_another_model_is_served_and_a_broken_one_is_taken_back(
    bundled_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tangram" / "kernels"
    monkeypatch.setenv("TANGRAM_KERNEL_CACHE", os.environ.get("TANGRAM_KERNEL_CACHE", str(cache)))
    first, second, broken = (
        random_llama(tmp_path / name, bundled_model_dir, seed) for seed, name in enumerate("abc")
    )
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4096])  # as after a copy that was cut off
    settings = Settings(home=tmp_path / "home", model=str(first), engine_args=OPTIONS)
    async with running_product(settings) as product:
        supervisor, stored = product.services.supervisor, product.services.engine_settings
        assert supervisor.status.model == "a"
        said = await answer(product)
        outcome, told = await switch(product, second)
        assert outcome == "applied", told
        assert "quick check" in told
        assert (supervisor.status.model, stored.model) == ("b", str(second))
        other = await answer(product)
        assert other != said
        outcome, told = await switch(product, broken)
        assert outcome == "failed"
        assert "previous" in told
        assert supervisor.status.ready
        assert (supervisor.status.model, stored.model) == ("b", str(second))
        assert await answer(product) == other
        actions = [entry.action for entry in await product.services.store.list_audit()]
        assert [one for one in actions if one.startswith("engine.")] == [
            "engine.model_failed",
            "engine.model",
        ]
