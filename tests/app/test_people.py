"""Accounts over their whole life: invited, signed in, found out, disabled, let in again."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest

from app.accounts import COOKIE
from app.errors import Forbidden
from db.views import QuotaView
from tests.app.conftest import NAME, PASSWORD, Product, eventually
from tests.patience import PATIENCE

Form = dict[str, str]


async def invited(product: Product, name: str = "bob", **options: bool) -> httpx.AsyncClient:
    """A browser that has taken an invitation."""
    answer = await product.http.post("/api/admin/invitations", json={"note": f"for {name}", **options})
    assert answer.status_code == 201
    http = product.client()
    path = answer.json()["url"].removeprefix(product.url)
    page = await http.get(path)
    assert page.status_code == 200
    form = {"name": name, "password": PASSWORD, "token": token_in(page.text)}
    assert (await http.post("/invite", data=form)).status_code == 303
    return http


def token_in(page: str) -> str:
    found = re.search(r'name="token" value="([^"]+)"', page)
    assert found is not None
    return found[1]


async def test_an_invitation_makes_one_account(product: Product) -> None:
    made = (await product.http.post("/api/admin/invitations", json={"note": "for Bob"})).json()
    assert (made["kind"], made["is_admin"], made["note"]) == ("invite", False, "for Bob")
    path = made["url"].removeprefix(product.url)
    assert path.startswith("/invite?token=")
    (listed,) = (await product.http.get("/api/admin/links")).json()["links"]
    assert listed == {key: value for key, value in made.items() if key != "url"}
    token = path.partition("=")[2]
    async with product.client() as http:
        form = {"name": NAME.upper(), "password": PASSWORD, "token": token}
        taken = await http.post("/invite", data=form)
        assert (taken.status_code, "That name is taken" in taken.text) == (409, True)
        assert (await http.post("/invite", data=form | {"name": "x", "password": "short"})).status_code == 400
        joined = await http.post("/invite", data=form | {"name": "bob"})
        assert (joined.status_code, joined.headers["location"]) == (303, "/")
        assert (await http.get("/api/account")).json()["name"] == "bob"
        assert (await http.get("/api/admin/users")).status_code == 403
        for attempt in (http.get(path), http.post("/invite", data=form | {"name": "eve"})):
            spent = await attempt
            assert (spent.status_code, "expired or was used already" in spent.text) == (404, True)
    assert (await product.http.get("/api/admin/links")).json() == {"links": []}
    assert token.encode() not in product.services.settings.database_path.read_bytes()
    names = [user["name"] for user in (await product.http.get("/api/admin/users")).json()["users"]]
    assert names == [NAME, "bob"]


async def test_there_is_no_other_way_in(product: Product) -> None:
    revoked = (await product.http.post("/api/admin/invitations", json={})).json()
    assert (await product.http.delete(f"/api/admin/links/{revoked['id']}")).status_code == 204
    late = await product.services.people.invite(None, hours=0)
    form = {"name": "eve", "password": PASSWORD}
    async with product.client() as http:
        for token in ("", "x", revoked["url"].partition("=")[2], late.path.partition("=")[2]):
            assert (await http.get("/invite", params={"token": token})).status_code == 404
            assert (await http.post("/invite", data=form | {"token": token})).status_code == 404
            assert (await http.post("/reset", data=form | {"token": token})).status_code == 404
        for path in ("/register", "/signup", "/api/users", "/api/admin/users"):
            assert (await http.post(path, json=form)).status_code in (401, 404, 405)
        assert (await http.post("/setup", data=form)).status_code == 403
    assert await product.services.store.count_users() == 1


async def test_what_runs_and_waits_for_a_disabled_user_ends(product: Product) -> None:
    """Streams of the stateless API end with an error's event; what waits in the queue never begins."""
    http = await invited(product)
    account = (await http.get("/api/account")).json()["id"]
    product.services.queue.set_quota(account, QuotaView(running=3))
    long = "/tokens 3000 /delay 0.05"
    chat = {"model": "fake-model", "stream": True, "messages": [{"role": "user", "content": long}]}
    text = {"model": "fake-model", "stream": True, "max_tokens": 3000}
    text["prompt"] = f"<|im_start|>user\n{long}<|im_end|>\n"
    conversation = (await http.post("/api/conversations", json={})).json()["id"]
    stored = chat | {"conversation_id": conversation}
    running = [
        asyncio.create_task(http.post(f"/v1/{path}", json=body))
        for path, body in (("chat/completions", chat), ("completions", text), ("chat/completions", stored))
    ]
    active = product.services.active
    await eventually(lambda: [bool(one.tokens()) for one in active.running()] == [True] * 3)
    waiting = [
        asyncio.create_task(http.post("/v1/chat/completions", json=chat | {"stream": stream}))
        for stream in (True, False)
    ]
    await eventually(lambda: product.services.queue.waiting == 2)
    await asyncio.sleep(0.1)  # the streams have begun
    answer = await product.http.patch(f"/api/admin/users/{account}", json={"disabled": True})
    assert answer.status_code == 200
    for stream in await asyncio.wait_for(asyncio.gather(*running), PATIENCE):
        assert stream.status_code == 200
        last = json.loads(stream.text.strip().splitlines()[-1].removeprefix("data: "))["error"]
        assert last["message"] == "Access was ended: this account has been disabled."
        assert (last["type"], last["code"]) == ("permission_error", "access_ended")
    for refused in await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE):
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert (product.services.queue.running, product.services.queue.waiting) == (0, 0)
    for late in (product.services.queue.admit, product.services.queue.join):  # signed in a moment before
        with pytest.raises(Forbidden, match="disabled"):
            late(account)
    await product.http.patch(f"/api/admin/users/{account}", json={"disabled": False})
    product.services.queue.join(account).leave()
    await http.aclose()


async def test_a_disabled_user_is_out_everywhere(product: Product) -> None:
    http = await invited(product)
    account = (await http.get("/api/account")).json()
    key = (await http.post("/api/keys", json={"name": "laptop"})).json()["key"]
    conversation = (await http.post("/api/conversations", json={})).json()["id"]
    reset = await product.services.people.reset_password(None, account["id"])
    await product.sign_in(http, "bob")
    async with product.client(headers={"Authorization": f"Bearer {key}"}) as program:
        sent = {"content": "/tokens 3000 /delay 0.05"}
        handle = await product.services.generation.send(account["id"], conversation, **sent)
        await eventually(lambda: product.services.generation.active == 1)
        answer = await product.http.patch(f"/api/admin/users/{account['id']}", json={"disabled": True})
        assert [user["disabled_at"] is None for user in answer.json()["users"]] == [True, False]
        assert product.services.generation.active == 0
        stopped = await product.services.store.get_message(account["id"], handle.reply.id)
        assert stopped.status == "stopped"
        for client in (http, program):
            for path in ("/api/conversations", "/v1/models", "/api/keys", "/api/account"):
                assert (await client.get(path)).status_code == 401, path
            posted = await client.post(f"/api/conversations/{conversation}/messages", json=sent)
            assert posted.status_code == 401
        form = {"name": "bob", "password": PASSWORD}
        refused = await http.post("/login", data=form)
        assert (refused.status_code, "name or the password is wrong" in refused.text) == (401, True)
        assert (await http.get(reset.path)).status_code == 404
        await product.http.patch(f"/api/admin/users/{account['id']}", json={"disabled": False})
        assert (await program.get("/v1/models")).status_code == 200
        assert (await http.get("/api/conversations")).status_code == 401  # the old sign-in stays ended
        assert (await http.post("/login", data=form)).status_code == 303
        assert len((await http.get("/api/conversations")).json()["conversations"]) == 1
    await http.aclose()


async def test_the_last_administrator_cannot_go(product: Product) -> None:
    path = f"/api/admin/users/{product.owner}"
    for change in ({"disabled": True}, {"is_admin": False}):
        answer = await product.http.patch(path, json=change)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
        # Nor does anything else of a refused change stay.
        assert (await product.http.patch(path, json=change | {"quota": {"running": 3}})).status_code == 409
    assert await product.services.store.list_quotas() == {}
    both = {"disabled": False, "is_admin": False}
    assert (await product.http.patch(path, json=both)).status_code == 409
    unchanged = await product.services.store.user_by_id(product.owner)
    assert unchanged is not None
    assert unchanged.is_admin
    assert not [entry for entry in await product.services.store.list_audit(10) if "user" in entry.action]
    other = await invited(product, "bob", is_admin=True)
    user = (await other.get("/api/account")).json()["id"]
    wrong = {"quota": {"running": 0}, "is_admin": False, "disabled": True}
    assert (await product.http.patch(f"/api/admin/users/{user}", json=wrong)).status_code == 400
    assert (await other.patch(path, json={"is_admin": False})).status_code == 200
    assert (await product.http.get("/api/admin/users")).status_code == 403
    assert (await other.patch("/api/admin/users/nobody", json={"disabled": True})).status_code == 404
    await other.aclose()


async def test_a_reset_ends_the_old_password(product: Product) -> None:
    http = await invited(product)
    user = (await http.get("/api/account")).json()["id"]
    issued = (await product.http.post(f"/api/admin/users/{user}/reset")).json()
    assert (await http.get("/api/account")).status_code == 401
    page = await http.get(issued["url"].removeprefix(product.url))
    form = {"password": "another password", "token": token_in(page.text)}
    assert (await http.post("/reset", data=form | {"password": "short"})).status_code == 400
    assert (await http.post("/reset", data=form)).status_code == 303
    assert (await http.get("/api/account")).json()["id"] == user
    assert (await http.post("/reset", data=form)).status_code == 404
    async with product.client() as other:
        for password, status in ((PASSWORD, 401), ("another password", 303)):
            answer = await other.post("/login", data={"name": "bob", "password": password})
            assert answer.status_code == status
    await http.aclose()


async def test_a_session_is_never_taken_over(product: Product) -> None:
    """Fixation: a token that was there before the sign-in is worth nothing after it."""
    form = {"name": NAME, "password": PASSWORD}
    async with product.client() as http:
        http.cookies.set(COOKIE, "planted by somebody else", domain="127.0.0.1")
        answer = await http.post("/login", data=form)
        first = answer.cookies[COOKIE]
        assert first != "planted by somebody else"
        # A sign-in on top of a sign-in makes a new session and ends the one before.
        http.cookies.set(COOKIE, first, domain="127.0.0.1")
        second = (await http.post("/login", data=form)).cookies[COOKIE]
        for token, status in (("planted by somebody else", 401), (first, 401), (second, 200)):
            async with product.client(cookies={COOKIE: token}) as check:
                assert (await check.get("/api/account")).status_code == status


async def test_own_sessions_are_seen_and_ended(product: Product) -> None:
    form = {"name": NAME, "password": PASSWORD}
    async with product.client(headers={"User-Agent": "phone"}) as phone, product.client() as other:
        assert (await phone.post("/login", data=form)).status_code == 303
        assert (await other.post("/login", data=form)).status_code == 303
        sessions = (await phone.get("/api/account/sessions")).json()["sessions"]
        assert len(sessions) == 3
        (mine,) = [session for session in sessions if session["current"]]
        assert (mine["user_agent"], mine["address"]) == ("phone", "127.0.0.1")
        assert not any("token" in key for key in mine)
        (first,) = [s for s in sessions if s["user_agent"] == ""]
        assert (await phone.delete(f"/api/account/sessions/{first['id']}")).status_code == 204
        assert (await product.http.get("/api/account")).status_code == 401
        assert (await phone.delete("/api/account/sessions")).json() == {"revoked": 1}
        assert (await other.get("/api/account")).status_code == 401
        assert (await phone.get("/api/account")).status_code == 200
        assert (await phone.delete("/api/account/sessions/missing")).status_code == 404


async def test_a_changed_password_ends_all_other_sessions(product: Product) -> None:
    http = await invited(product)
    async with product.client() as elsewhere:
        await product.sign_in(elsewhere, "bob")
        before = http.cookies[COOKIE]
        path = "/api/account/password"
        wrong = await http.post(path, json={"current": "wrong", "password": "another password"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "current")
        assert (await http.post(path, json={"current": PASSWORD, "password": "short"})).status_code == 400
        assert (await elsewhere.get("/api/account")).status_code == 200
        changed = await http.post(path, json={"current": PASSWORD, "password": "another password"})
        assert changed.status_code == 200
        assert http.cookies[COOKIE] != before
        assert (await http.get("/api/account")).status_code == 200
        assert (await elsewhere.get("/api/account")).status_code == 401
        http.cookies.set(COOKIE, before, domain="127.0.0.1")
        assert (await http.get("/api/account")).status_code == 401
    await http.aclose()


async def test_guessing_the_current_password_is_slowed_down(product: Product) -> None:
    guess = {"current": "wrong", "password": "another password"}
    answers = [await product.http.post("/api/account/password", json=guess) for _ in range(11)]
    assert [answer.status_code for answer in answers] == [400] * 10 + [429]
    assert int(answers[-1].headers["retry-after"]) > 0


async def test_a_key_cannot_do_what_a_sign_in_can(product: Product) -> None:
    created = (await product.http.post("/api/keys", json={"name": "laptop"})).json()
    async with product.client(headers={"Authorization": f"Bearer {created['key']}"}) as program:
        assert (await program.get("/v1/models")).status_code == 200
        for method, path, body in (
            ("POST", "/api/keys", {"name": "another"}),
            ("POST", "/api/account/password", {"current": PASSWORD, "password": "another password"}),
            ("GET", "/api/account/sessions", None),
            ("POST", "/api/admin/invitations", {"is_admin": True}),
            ("GET", "/api/admin/audit", None),
            ("PATCH", f"/api/admin/users/{product.owner}", {"is_admin": True}),
        ):
            answer = await program.request(method, path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), path
        # A key that is wrong is not made up for by the browser's cookie.
        program.cookies.set(COOKIE, product.http.cookies[COOKIE])
        answer = await program.get("/api/account", headers={"Authorization": "Bearer tc-wrong"})
        assert answer.status_code == 401


async def test_what_other_sites_cannot_do(product: Product) -> None:
    evil = {"Origin": "https://evil.example"}
    for method, path in (
        ("POST", "/api/account/password"),
        ("DELETE", "/api/account/sessions"),
        ("POST", "/api/admin/invitations"),
        ("PATCH", f"/api/admin/users/{product.owner}"),
        ("POST", "/logout"),
    ):
        answer = await product.http.request(method, path, json={}, headers=evil)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_origin"), path
    async with product.client(headers=evil) as nobody:
        for path in ("/invite", "/reset"):
            assert (await nobody.post(path, data={"token": "x"})).status_code == 403
    # Behind TLS a page of the same name that came in the clear is another site.
    tls = {"X-Forwarded-Proto": "https", "Origin": product.url}
    assert (await product.http.post("/api/conversations", json={}, headers=tls)).status_code == 403
    tls["Origin"] = product.url.replace("http:", "https:")
    assert (await product.http.post("/api/conversations", json={}, headers=tls)).status_code == 201


async def test_the_trail_of_all_this(product: Product) -> None:
    headers = {"X-Request-ID": "my-request.1"}
    async with product.client() as http:
        for password in ("wrong password", PASSWORD):
            await http.post("/login", data={"name": NAME, "password": password}, headers=headers)
        await http.post("/login", data={"name": "my password by mistake", "password": "x"})
        key = (await http.post("/api/keys", json={"name": "laptop"})).json()
        await http.delete(f"/api/keys/{key['id']}")
        await http.post("/logout")
    await product.http.patch(f"/api/admin/users/{product.owner}", json={"quota": {"running": 3}})
    entries = (await product.http.get("/api/admin/audit")).json()["entries"][::-1]
    assert [(entry["action"], entry["user_id"] == product.owner) for entry in entries] == [
        ("sign_in.failed", False),
        ("sign_in", True),
        ("sign_in.failed", False),
        ("api_key.create", True),
        ("api_key.revoke", True),
        ("sign_out", True),
        ("user.quota", True),
    ]
    assert entries[0]["after"] == {"user_id": product.owner, "disabled": False}
    assert entries[2]["after"] is None
    assert [entry["request_id"] for entry in entries[:2]] == ["my-request.1"] * 2
    assert {entry["address"] for entry in entries} == {"127.0.0.1"}
    written = str(entries)
    for secret in (PASSWORD, "wrong password", "by mistake", key["key"]):
        assert secret not in written
    assert (await product.http.get("/api/account")).json()["limits"]["running"] == 3


async def test_many_at_once_take_one_invitation(product: Product) -> None:
    issued = await product.services.people.invite(None)
    token = issued.path.partition("=")[2]
    async with product.client() as http:
        answers = await asyncio.gather(
            *(
                http.post("/invite", data={"name": f"n{i}", "password": PASSWORD, "token": token})
                for i in range(5)
            )
        )
    assert sorted(answer.status_code for answer in answers) == [303, 404, 404, 404, 404]
    assert await product.services.store.count_users() == 2


async def test_the_page_of_ones_own_account(product: Product) -> None:
    http = await invited(product, "<b>bob")
    async with product.client(headers={"User-Agent": "<i>phone"}) as phone:
        assert (await phone.post("/login", data={"name": "<b>bob", "password": PASSWORD})).status_code == 303
        page = (await http.get("/account")).text
        assert "&lt;b&gt;bob" in page
        assert "&lt;i&gt;phone" in page
        assert "<b>" not in page
        assert "<i>" not in page
        made = await http.post("/account/keys", data={"name": "laptop"})
        key = re.search(r"<code id=\"secret\">(tc-[\w-]+)</code>", made.text)
        assert key is not None
        assert made.headers["cache-control"] == "no-store"
        assert "is not shown again" in made.text
        again = (await http.get("/account")).text
        assert key[1] not in again
        assert "laptop" in again
        assert (await http.post("/account/keys", data={"name": " "})).status_code == 400
        async with product.client(headers={"Authorization": f"Bearer {key[1]}"}) as program:
            assert (await program.get("/v1/models")).status_code == 200
            assert (await program.get("/account")).status_code == 403
            revoke = re.search(r'action="(/account/keys/\w+/revoke)"', again)
            assert revoke is not None
            assert (await http.post(revoke[1])).headers["location"] == "/account"
            assert (await program.get("/v1/models")).status_code == 401
        end = re.search(r'action="(/account/sessions/\w{32}/revoke)"', again)
        assert end is not None
        assert (await http.post(end[1])).status_code == 303
        assert (await phone.get("/api/account")).status_code == 401
        await product.sign_in(phone, "<b>bob")
        assert (await http.post("/account/sessions/revoke")).status_code == 303
        assert (await phone.get("/api/account")).status_code == 401
        form = {"current": "wrong", "password": "another password"}
        wrong = await http.post("/account/password", data=form)
        assert (wrong.status_code, 'role="alert"' in wrong.text) == (400, True)
        assert (await http.post("/account/password", data=form | {"current": PASSWORD})).status_code == 303
        assert (await http.get("/account")).status_code == 200
        evil = await http.post("/account/sessions/revoke", headers={"Origin": "https://evil.example"})
        assert evil.status_code == 403
    await http.aclose()
    async with product.client(headers={"Accept": "text/html"}) as nobody:
        assert (await nobody.get("/account")).headers["location"] == "/login"


@pytest.mark.parametrize("asked", ["", "x" * 65, "two words", "new\tline", "é"])
async def test_request_ids(product: Product, asked: str) -> None:
    async with product.client() as http:
        given = await http.get("/health/live", headers={"X-Request-ID": "abc.DEF_1-2"})
        assert given.headers["x-request-id"] == "abc.DEF_1-2"
        made = await http.get("/health/live", headers={b"X-Request-ID": asked.encode()})
        assert re.fullmatch(r"[0-9a-f]{16}", made.headers["x-request-id"])
        refused = await http.get("/api/conversations")
        assert re.fullmatch(r"[0-9a-f]{16}", refused.headers["x-request-id"])
