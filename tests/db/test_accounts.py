import asyncio
import time

import pytest

from db import Database, Store
from db.errors import Conflict, InvalidInput, NotFound
from db.views import UserView
from tests.db.helpers import dump


def soon() -> int:
    return time.time_ns() // 1_000_000 + 3_600_000


async def test_users_are_found_by_name_and_id(store: Store) -> None:
    assert await store.count_users() == 0
    ada = await store.create_user("  Ada  Lovelace", "hash", is_admin=True)
    bob = await store.create_user("Bob", "other")
    assert (ada.name, ada.is_admin, ada.disabled_at) == ("Ada Lovelace", True, None)
    assert (bob.is_admin, bob.password_hash) == (False, "other")
    assert await store.count_users() == 2
    assert await store.user_by_name("ada LOVELACE ") == ada
    assert await store.user_by_id(bob.id) == bob
    for name in ("Ada", "", "%", "x" * 300, "\ud800"):
        assert await store.user_by_name(name) is None
    assert await store.user_by_id("nobody") is None


async def test_cache_salts_are_secret_and_differ(store: Store) -> None:
    users = [await store.create_user(name, "a hash") for name in ("Ada", "Bob")]
    salts = [user.cache_salt for user in users]
    assert salts[0] != salts[1]
    assert all(len(bytes.fromhex(salt)) == 32 for salt in salts)
    assert salts[0] not in repr(users[0])
    assert "a hash" not in repr(users[0])


async def test_a_name_is_taken_in_any_case(store: Store) -> None:
    await store.create_user("Ada", "hash")
    with pytest.raises(Conflict, match="that name is taken"):
        await store.create_user("ADA", "hash")
    with pytest.raises(InvalidInput, match="name: must not be empty"):
        await store.create_user(" ", "hash")
    assert await store.count_users() == 1


async def test_only_one_of_many_is_the_first_user(store: Store) -> None:
    attempts = [store.create_first_user(f"user {number}", "hash") for number in range(8)]
    results = await asyncio.gather(*attempts, return_exceptions=True)
    winners = [result for result in results if isinstance(result, UserView)]
    assert [winner.is_admin for winner in winners] == [True]
    assert sum(isinstance(result, Conflict) for result in results) == 7
    assert await store.count_users() == 1


async def test_sign_in(store: Store, owner: UserView) -> None:
    await store.create_session(owner.id, "token", soon())
    assert await store.session_user("token") == owner
    assert await store.session_user("other") is None
    await store.delete_session("token")
    await store.delete_session("token")
    assert await store.session_user("token") is None
    with pytest.raises(NotFound, match="user not found"):
        await store.create_session("nobody", "token", soon())


async def test_expired_sign_ins_are_void_and_forgotten(
    store: Store, owner: UserView, database: Database
) -> None:
    await store.create_session(owner.id, "old", 1)
    assert await store.session_user("old") is None
    await store.create_session(owner.id, "new", soon())
    assert [row[0] for row in dump(database)["sessions"]] == ["new"]


async def test_last_use_is_noted_now_and_then(
    store: Store, owner: UserView, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.create_session(owner.id, "token", soon())
    key = await store.create_api_key(owner.id, "laptop", "key")
    before = dump(database)
    await store.session_user("token")
    assert dump(database) == before
    await store.api_key_user("key")
    used = dump(database)
    assert (await store.list_api_keys(owner.id))[0].last_used_at is not None
    await store.api_key_user("key")
    assert dump(database) == used
    monkeypatch.setattr("db.accounts._NOTE_USE_EVERY_MS", 0)
    await store.session_user("token")
    await store.api_key_user("key")
    after = dump(database)
    assert after["sessions"][0][4] > before["sessions"][0][4]
    assert after["api_keys"][0][5] > used["api_keys"][0][5]
    assert after["api_keys"][0][0] == key.id


async def test_api_keys(store: Store, owner: UserView) -> None:
    first = await store.create_api_key(owner.id, "laptop", "hash 1")
    second = await store.create_api_key(owner.id, "phone", "hash 2")
    assert await store.list_api_keys(owner.id) == [second, first]
    assert await store.api_key_user("hash 1") == owner
    revoked = await store.revoke_api_key(owner.id, first.id)
    assert revoked.revoked_at is not None
    assert await store.revoke_api_key(owner.id, first.id) == revoked
    assert await store.api_key_user("hash 1") is None
    assert await store.api_key_user("hash 2") == owner
    assert await store.api_key_user("hash 3") is None
    with pytest.raises(NotFound, match="API key not found"):
        await store.revoke_api_key(owner.id, "missing")
    with pytest.raises(NotFound, match="user not found"):
        await store.create_api_key("nobody", "name", "hash")


async def test_a_disabled_user_is_shut_out(store: Store, owner: UserView) -> None:
    await store.create_session(owner.id, "token", soon())
    await store.create_api_key(owner.id, "laptop", "key")
    await store.disable_user(owner.id)
    assert await store.session_user("token") is None
    assert await store.api_key_user("key") is None
    await store.create_session(owner.id, "later", soon())
    assert await store.session_user("later") is None
    disabled = await store.user_by_id(owner.id)
    assert disabled is not None
    assert disabled.disabled_at is not None


async def test_a_new_password_ends_the_sign_ins(store: Store, owner: UserView, stranger: UserView) -> None:
    await store.create_session(owner.id, "mine", soon())
    await store.create_session(stranger.id, "hers", soon())
    await store.set_password_hash(owner.id, "new hash")
    changed = await store.user_by_id(owner.id)
    assert changed is not None
    assert changed.password_hash == "new hash"
    assert await store.session_user("mine") is None
    assert await store.session_user("hers") == stranger
    for call in (store.set_password_hash("nobody", "x"), store.disable_user("nobody")):
        with pytest.raises(NotFound, match="user not found"):
            await call
