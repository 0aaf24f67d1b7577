"""JSON that no field can hold is refused with a sentence, on every route that takes a JSON body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel

from app.routes import account, account_page, api, auth, completions, keys, openai, people, replies
from app.routes.json_body import JsonBody
from tests.app.conftest import Product

MODULES = (api, completions, openai, replies, keys, account, people)
ROUTERS = tuple(module.router for module in MODULES)
SURROGATE, HUGE = '"a \\ud800 b"', "1" + "0" * 400
NOT_FINITE = ("1e999", "-1e999", "NaN", "Infinity")
WHOLE = {
    "content": "/say ok",
    "model": "fake-model",
    "messages": [{"role": "user", "content": "/say ok"}],
    "name": "a key",
    "stream": False,
}


def json_routes() -> list[tuple[str, str, type[BaseModel]]]:
    """(method, path, body) of each route with a JSON body."""
    found = []
    for router in ROUTERS:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.body_field is not None:
                (method,) = route.methods
                annotation = route.dependant.body_params[0].field_info.annotation
                models = [annotation, *getattr(annotation, "__args__", ())]
                (model,) = (kind for kind in models if isinstance(kind, type) and issubclass(kind, BaseModel))
                found.append((method, route.path, model))
    return found


ROUTES = json_routes()


def bodies(model: type[BaseModel], bad: str) -> list[str]:
    """`WHOLE` with one field at a time bad: itself, inside a list, inside an object, or as a key."""
    made = []
    for name in [*model.model_fields, "unknown"]:
        forms = [bad, f"[{bad}]", f'[{{"role": "user", "content": {bad}}}]', f'{{"x": [{bad}]}}']
        if bad == SURROGATE:
            forms.append(f"{{{bad}: 1}}")
        for form in forms:
            rest = {key: value for key, value in WHOLE.items() if key != name}
            made.append(json.dumps(rest)[:-1] + f', "{name}": {form}}}')
    return made


async def post(product: Product, method: str, path: str, text: str) -> Any:
    return await product.http.request(
        method, path, content=text.encode(), headers={"Content-Type": "application/json"}
    )


async def address(product: Product, path: str) -> str:
    conversation = await product.conversation()
    reply = await product.reply(conversation, "/say ok")
    names = {"conversation_id": conversation, "reply_id": reply.id, "message_id": reply.parent_id}
    return path.format(**names, user_id=product.owner)


def test_all_json_routes_are_found() -> None:
    assert {path for _, path, _ in ROUTES} >= {
        "/api/conversations",
        "/api/conversations/{conversation_id}",
        "/api/conversations/{conversation_id}/messages",
        "/api/messages/{message_id}/edit",
        "/api/replies/{reply_id}/regenerate",
        "/api/keys",
        "/api/account/password",
        "/api/admin/invitations",
        "/api/admin/users/{user_id}",
        "/api/admin/users/{user_id}/reset",
        "/v1/chat/completions",
    }
    assert all(issubclass(model, JsonBody) for _, _, model in ROUTES)


@pytest.mark.parametrize(("method", "path", "model"), ROUTES, ids=[route[1] for route in ROUTES])
async def test_half_characters_and_endless_numbers(
    product: Product, method: str, path: str, model: type[BaseModel]
) -> None:
    url = await address(product, path)
    for bad in (SURROGATE, *NOT_FINITE):
        for text in [*bodies(model, bad), bad, f"[{bad}]"]:
            answer = await post(product, method, url, text)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "invalid_request"), text
            assert ("surrogate" if bad == SURROGATE else "finite") in error["message"], text
    for name in model.model_fields:
        rest = {key: value for key, value in WHOLE.items() if key != name}
        for number in (HUGE, f"-{HUGE}", "9" * 5000):
            answer = await post(product, method, url, json.dumps(rest)[:-1] + f', "{name}": {number}}}')
            assert answer.status_code < 500, (name, answer.text)


async def test_the_field_is_named(product: Product) -> None:
    text = '{"model": "fake-model", "messages": [{"role": "user", "content": "\\udfff"}]}'
    answer = await post(product, "POST", "/v1/chat/completions", text)
    assert answer.json()["error"]["param"] == "messages.0.content"
    whole_pair = await post(product, "POST", "/api/conversations", '{"title": "\\ud83e\\udd9c"}')
    assert whole_pair.json()["title"] == "🦜"


@pytest.mark.parametrize("top_k", [2**31, 2**63, -2])
async def test_top_k_that_the_engine_cannot_hold(product: Product, top_k: int) -> None:
    answer = await product.http.post("/v1/chat/completions", json={**WHOLE, "top_k": top_k})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_k")
    assert (await product.http.post("/v1/chat/completions", json={**WHOLE, "top_k": 2**31 - 1})).is_success


@pytest.mark.parametrize("place", ["9" * 5000, "9" * 19, "-1", "x"])
async def test_last_event_id_that_is_no_place(product: Product, place: str) -> None:
    reply = await product.reply(await product.conversation(), "/say ok")
    answer = await product.http.get(f"/api/replies/{reply.id}/events", headers={"Last-Event-ID": place})
    assert answer.status_code == 200
    assert answer.text.startswith("id: 2\nevent: snapshot\n")


FORMS = [
    (route.path, param.alias)
    for module in (auth, account_page)
    for route in module.router.routes
    if isinstance(route, APIRoute)
    for param in route.dependant.body_params
]


@pytest.mark.parametrize(("path", "field"), FORMS)
async def test_forms_refuse_half_a_character_too(product: Product, path: str, field: str) -> None:
    """A multipart form may name an encoding that can hold it."""
    assert len(FORMS) > 10
    for charset, half in (("utf-7", "+2AA-abcdefgh"), ("unicode_escape", "\\ud800abcdefgh")):
        text = (
            f'--x\r\nContent-Disposition: form-data; name="_charset_"\r\n\r\n{charset}\r\n'
            f'--x\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{half}\r\n--x--\r\n'
        )
        kind = f"multipart/form-data; boundary=x; charset={charset}"
        answer = await product.http.post(path, content=text, headers={"Content-Type": kind})
        assert answer.status_code == 400, (path, field, charset, answer.text)
        assert "surrogate" in answer.json()["error"]["message"]
