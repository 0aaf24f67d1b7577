"""Who gets in: first-run setup, sign-in, API keys, and that no route forgets to ask."""

from __future__ import annotations

import asyncio
import re
import secrets
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import HTTPConnection

from app.__main__ import main
from app.accounts import COOKIE, Browser, is_local, network_of
from app.errors import NotSignedIn, TooManyAttempts
from app.factory import create_app
from app.middleware import MAX_BODY, MAX_FORM
from app.settings import Settings
from tests.app.conftest import NAME, PASSWORD, Product, serving
from tests.fake_engine import FakeEngine
from tests.patience import PATIENCE

ADMIN = "/api/admin/"
PUBLIC = {"/health/live", "/health/ready", "/login", "/setup", "/invite", "/reset", "/logout"}
LOCAL = {"/metrics"}
FALLBACKS = {"/api/{rest:path}", "/v1/{rest:path}"}
BODIES: dict[str, Any] = {
    "/api/conversations": {},
    "/api/conversations/{conversation_id}": {"title": "x"},
    "/api/conversations/{conversation_id}/messages": {"content": "/say x"},
    "/api/messages/{message_id}/edit": {"content": "/say x"},
    "/api/keys": {"name": "x"},
    "/api/calibration-consent": {"given": True},
    "/api/admin/profile": {"profile": "auto"},
    "/api/replies/{reply_id}/rating": {"rating": 1},
    "/api/account/password": {"current": "x", "password": "y"},
    "/v1/chat/completions": {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]},
}


def routes(product: Product) -> list[tuple[str, str]]:
    found = [
        (method, route.path)
        for route in product.app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods)
    ]
    assert len(found) > 20
    return found


async def test_no_route_answers_a_stranger(product: Product) -> None:
    async with product.client() as nobody:
        for method, path in routes(product):
            if path in PUBLIC | LOCAL:
                continue
            answer = await nobody.request(method, re.sub(r"{.*?}", "x", path), json=BODIES.get(path, {}))
            assert answer.status_code == 401, (method, path)
            assert answer.json()["error"]["code"] == "not_signed_in"


async def test_each_route_with_an_id_is_blind_to_other_peoples(product: Product) -> None:
    conversation = await product.conversation()
    reply = await product.reply(conversation, "/say secret")
    _, key = await product.services.accounts.create_api_key(product.owner, "mine")
    (session,) = await product.services.store.list_sessions(product.owner)
    ids = {
        "conversation_id": conversation,
        "message_id": reply.parent_id,
        "reply_id": reply.id,
        "key_id": key.id,
        "session_id": session.id,
        "model_id": "another",
        "user_id": product.owner,
        "name": "another",
        "link_id": (await product.services.people.invite(None)).link.id,
    }
    checked = 0
    async with await product.stranger() as by_key, product.client() as by_session:
        await product.sign_in(by_session, "stranger")
        for method, path in routes(product):
            if "{" not in path or path in FALLBACKS:
                continue
            address = re.sub(r"{(\w+)(?::path)?}", lambda found: ids[found[1]], path)
            for stranger in (by_key, by_session):
                answer = await stranger.request(method, address, json=BODIES.get(path, {}))
                ours = path.startswith(ADMIN) or (stranger is by_key and "/account/" in path)
                assert answer.status_code == (403 if ours else 404), (method, path, answer.text)
                assert "secret" not in answer.text
                checked += 1
        listed = await by_key.get("/api/conversations", params={"query": "secret"})
        assert listed.json() == {"conversations": []}
        assert (await by_key.get("/api/keys")).json()["keys"][0]["name"] == "test"
    assert checked >= 34
    assert (await product.services.store.get_message(product.owner, reply.id)).content == "secret"
    assert (await product.services.store.list_api_keys(product.owner))[0].revoked_at is None
    assert (await product.services.store.list_sessions(product.owner))[0].id == session.id
    assert len(await product.services.people.list_links()) == 1


async def test_administrators_routes_refuse_everybody_else(product: Product) -> None:
    async with await product.stranger() as stranger:
        asked = [(method, path) for method, path in routes(product) if path.startswith(ADMIN)]
        assert len(asked) >= 11
        for method, path in asked:
            answer = await stranger.request(method, re.sub(r"{.*?}", "x", path), json=BODIES.get(path, {}))
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), (method, path)


async def test_pages_send_strangers_to_sign_in(product: Product) -> None:
    async with product.client(headers={"Accept": "text/html"}) as nobody:
        for path in ("/", "/admin", "/admin/", "/some/page"):
            answer = await nobody.get(path)
            assert (answer.status_code, answer.headers["location"]) == (303, "/login")
        assert (await nobody.get("/setup")).headers["location"] == "/login"
        page = await nobody.get("/login")
        assert page.status_code == 200
        assert 'name="password"' in page.text
        assert "frame-ancestors 'self'" in page.headers["content-security-policy"]


async def test_sign_in_and_out(product: Product) -> None:
    async with product.client() as http:
        wrong = await http.post("/login", data={"name": NAME, "password": "wrong password"})
        assert wrong.status_code == 401
        assert "name or the password is wrong" in wrong.text
        unknown = await http.post("/login", data={"name": "<script>x", "password": "x"})
        assert unknown.status_code == 401
        assert "<script>x" not in unknown.text
        assert "&lt;script&gt;x" in unknown.text
        right = await http.post("/login", data={"name": NAME.upper(), "password": PASSWORD})
        assert (right.status_code, right.headers["location"]) == (303, "/")
        cookie = right.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=lax" in cookie.lower()
        assert "secure" not in cookie.lower()
        token = http.cookies[COOKIE]
        assert (await http.get("/api/conversations")).status_code == 200
        assert (await http.post("/logout")).status_code == 303
        http.cookies.set(COOKIE, token)
        assert (await http.get("/api/conversations")).status_code == 401
    async with product.client(headers={"X-Forwarded-Proto": "https"}) as http:
        answer = await http.post("/login", data={"name": NAME, "password": PASSWORD})
        assert "Secure" in answer.headers["set-cookie"]
    assert (await product.http.get("/api/conversations")).status_code == 200  # the other session goes on


async def test_guessing_is_slowed_down(product: Product) -> None:
    async with product.client() as http:
        for _ in range(10):
            assert (await http.post("/login", data={"name": "bob", "password": "x"})).status_code == 401
        slowed = await http.post("/login", data={"name": "BOB", "password": "x"})
        assert slowed.status_code == 429
        assert 1 <= int(slowed.headers["retry-after"]) <= 300
        assert (await http.post("/login", data={"name": NAME, "password": PASSWORD})).status_code == 303


async def test_guesses_at_once_are_slowed_down_too(product: Product) -> None:
    async def guess(name: str) -> int:
        return (await http.post("/login", data={"name": name, "password": "x"})).status_code

    async with product.client() as http:
        answers = await asyncio.gather(*(guess("bob") for _ in range(20)))
        assert sorted(answers) == [401] * 10 + [429] * 10
        # Signing in does not use up what the address has left for other names, and does not give it back.
        for _ in range(2):
            assert (await http.post("/login", data={"name": NAME, "password": PASSWORD})).status_code == 303
        answers = await asyncio.gather(*(guess(f"name{number}") for number in range(25)))
        assert sorted(answers) == [401] * 20 + [429] * 5
        assert await guess("another") == 429


async def test_guesses_from_many_addresses_are_slowed_down_but_do_not_shut_the_owner_out(
    product: Product,
) -> None:
    accounts, numbers = product.services.accounts, iter(range(1000))

    async def guess(name: str, password: str = "x", address: str = "") -> str:
        address = address or f"2001:db8:{next(numbers):x}::1"
        try:
            await accounts.sign_in(name, password, browser=Browser(address))
        except (NotSignedIn, TooManyAttempts) as error:
            return error.code
        return "in"

    assert await guess(NAME, PASSWORD, "198.51.100.7") == "in"
    spellings = (NAME, f" {NAME.upper()} ", f"{NAME}\t", f"\u3000{NAME}")
    for spelling in spellings:
        for _ in range(7):
            assert await guess(spelling) == "not_signed_in"
    assert [await guess(NAME) for _ in range(3)] == ["not_signed_in"] * 2 + ["too_many_attempts"]
    assert [await guess(spelling, PASSWORD) for spelling in spellings] == ["too_many_attempts"] * 4
    assert await guess("somebody else") == "not_signed_in"
    assert [await guess(NAME, PASSWORD, "198.51.100.7") for _ in range(3)] == ["in"] * 3
    assert await guess(NAME, PASSWORD) == "too_many_attempts", "the owner's signing in gives nothing back"
    for number in range(30):
        assert await guess("no such name") == "not_signed_in", number
    assert await guess("no  such name") == "too_many_attempts", "an unknown name shows itself by nothing"


def test_guesses_are_counted_by_what_one_subscriber_has() -> None:
    assert (
        network_of("2001:db8:1:2::3") == network_of("2001:db8:1:2:ffff::9") != network_of("2001:db8:1:3::3")
    )
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("fe80::1%eth0") == network_of("fe80::2")
    assert (network_of(""), network_of("testclient")) == ("", "testclient")


async def test_other_sites_cannot_use_a_signed_in_browser(product: Product) -> None:
    http = product.http
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": product.url.replace("127.0.0.1", "localhost")},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        answer = await http.post("/api/conversations", json={}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_origin")
    assert (
        await http.post("/api/conversations", json={}, headers={"Origin": product.url})
    ).status_code == 201
    async with product.client(headers={"Origin": "https://evil.example"}) as nobody:
        form = {"name": NAME, "password": PASSWORD}
        assert (await nobody.post("/login", data=form)).status_code == 403
        assert (await nobody.post("/setup", data=form)).status_code == 403


async def test_api_keys(product: Product) -> None:
    created = (await product.http.post("/api/keys", json={"name": "laptop"})).json()
    async with product.client(headers={"Authorization": f"Bearer {created['key']}"}) as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "fake-model"
        assert (
            await http.post("/api/conversations", json={}, headers={"Origin": "x://y"})
        ).status_code == 201
        (listed,) = (await http.get("/api/keys")).json()["keys"]
        assert listed["name"] == "laptop"
        assert listed["last_used_at"] is not None
        assert "key" not in listed
        assert (await http.delete(f"/api/keys/{listed['id']}")).status_code == 204
        assert (await http.get("/v1/models")).status_code == 401
    database = product.services.settings.database_path.read_bytes()
    assert created["key"].encode() not in database
    async with product.client(headers={"Authorization": "Bearer tc-wrong"}) as http:
        assert (await http.get("/v1/models")).status_code == 401


async def test_first_run_setup(settings: Settings, fake_engine: FakeEngine) -> None:
    app = create_app(settings, chat_ui=False)
    accounts = app.state.services.accounts
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE) as http,
    ):
        page = {"Accept": "text/html"}
        assert (await http.get("/", headers=page)).headers["location"] == "/setup"
        assert (await http.get("/login", headers=page)).headers["location"] == "/setup"
        assert '<label for="key">' in (await http.get("/setup")).text
        linked = await http.get("/setup", params={"key": accounts.setup_key})
        assert '<label for="key">' not in linked.text
        assert f'name="key" value="{accounts.setup_key}"' in linked.text
        assert linked.headers["cache-control"] == "no-store"
        form = {"name": "ann", "password": "long enough"}
        for key in ({}, {"key": "wrong"}, {"key": "é"}):
            assert (await http.post("/setup", data=form | key)).status_code == 403
        form["key"] = accounts.setup_key
        short = await http.post("/setup", data={**form, "password": "short"})
        assert (short.status_code, "at least 8" in short.text) == (400, True)
        assert (await http.post("/setup", data={**form, "name": "\n"})).status_code == 400
        made = await http.post("/setup", data=form)
        assert (made.status_code, made.headers["location"]) == (303, "/")
        user = await app.state.services.store.user_by_name("ann")
        assert user.is_admin
        assert user.password_hash.startswith("$argon2id$")
        again = await http.post("/setup", data={**form, "name": "eve"})
        assert again.status_code == 403
        assert (await http.get("/setup", params={"key": accounts.setup_key})).headers["location"] == "/login"
        assert await app.state.services.store.count_users() == 1


async def test_the_setup_link_expires_and_is_not_guessed(
    settings: Settings, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(settings, chat_ui=False)
    accounts = app.state.services.accounts
    form = {"name": "ann", "password": "long enough"}
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE) as http,
    ):
        monkeypatch.setattr(accounts, "_setup_until", 0.0)
        late = await http.post("/setup", data={**form, "key": accounts.setup_key})
        assert (late.status_code, "has expired" in late.text) == (403, True)
        statuses = [(await http.post("/setup", data={**form, "key": "x"})).status_code for _ in range(11)]
        assert statuses == [403] * 10 + [429]
        monkeypatch.undo()
        assert (await http.post("/setup", data={**form, "key": accounts.setup_key})).status_code == 429
        assert await app.state.services.store.count_users() == 0
    assert create_app(settings, chat_ui=False).state.services.accounts.setup_key != accounts.setup_key


@pytest.mark.parametrize("secret", ["changeme", "CHANGE-ME", "your-secret-key", "<key>", "${KEY}", "x" * 40])
@pytest.mark.parametrize("variable", ["TANGRAM_SETUP_KEY", "TANGRAM_ENGINE_API_KEY"])
def test_placeholders_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, secret: str
) -> None:
    monkeypatch.setenv(variable, secret)
    assert main([]) == 2
    said = capsys.readouterr().out
    assert f"setting {variable.removeprefix('TANGRAM_').lower()}: " in said
    assert "placeholder" in said
    assert secret not in said


def test_random_secrets_are_no_placeholders(tmp_path: Path) -> None:
    for _ in range(200):
        secret = secrets.token_urlsafe(24)
        assert Settings(home=tmp_path, setup_key=secret, engine_api_key=secret).setup_key == secret
    with pytest.raises(ValidationError, match="at least 16 characters"):
        Settings(home=tmp_path, setup_key="short7Hq2")


@pytest.mark.parametrize(
    ("client", "host", "local"),
    [
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("127.0.0.1", "localhost:8000", True),
        ("::1", "[::1]:8000", True),
        ("127.0.0.1", "evil.example:8000", False),
        ("10.0.0.7", "localhost:8000", False),
        ("10.0.0.7", "10.0.0.1:8000", False),
    ],
)
def test_what_counts_as_this_machine(client: str, host: str, local: bool) -> None:
    scope = {
        "type": "http",
        "scheme": "http",
        "path": "/",
        "query_string": b"",
        "server": ("0.0.0.0", 8000),
        "client": (client, 5000),
        "headers": [(b"host", host.encode())],
    }
    assert is_local(HTTPConnection(scope)) is local


async def test_metrics_are_for_this_machine_and_for_administrators(product: Product) -> None:
    foreign = {"Host": "chat.example"}
    async with product.client() as http:
        text = (await http.get("/metrics")).text
        assert (await http.get("/metrics", headers=foreign)).status_code == 401
    assert 'tangram_chat_engine_state{state="ready"} 1.0' in text
    assert 'tangram_chat_pool_pages{kind="total"} 20000.0' in text
    assert (await product.http.get("/metrics", headers=foreign)).status_code == 200
    async with await product.stranger() as http:
        assert (await http.get("/metrics", headers=foreign)).status_code == 403


async def test_bodies_have_a_limit(product: Product) -> None:
    async def untold() -> Any:  # chunked: its length is not said beforehand
        for _ in range(4):
            yield b"x" * 32768

    too_large = await product.http.post("/api/conversations", content=b"x" * (MAX_BODY + 1))
    assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "too_large")
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    async with product.client(headers=headers) as nobody:
        assert (await nobody.post("/login", content=b"name=" + b"x" * MAX_FORM)).status_code == 413
        assert (await nobody.post("/login", content=untold())).status_code == 413
