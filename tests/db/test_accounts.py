import asyncio
import time

import pytest

from db import Database, Store
from db.errors import Conflict, InvalidInput, NotFound
from db.views import QuotaView, UserView
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


ALIKE = [
    ("JÜRGEN", "jürgen"),
    ("Jürgen", "Ju\u0308rgen"),
    ("adm", "\uff41dm"),
    ("office", "o\ufb03ce"),
    ("Strasse", "straße"),
    ("ΝΊΚΟΣ", "νίκος"),
    ("adm", "a\u200bdm"),
    ("a b", "A\u00a0B"),
]


@pytest.mark.parametrize(("taken", "name"), ALIKE)
async def test_names_that_look_the_same_are_one(store: Store, taken: str, name: str) -> None:
    user = await store.create_user(taken, "hash")
    other = await store.create_user("someone else", "hash")
    with pytest.raises(Conflict, match="that name is taken"):
        await store.create_user(name, "hash")
    await store.create_invitation("token", soon(), is_admin=False, note="", created_by=None)
    with pytest.raises(Conflict, match="that name is taken"):
        await store.accept_invitation("token", name, "hash")
    assert await store.count_users() == 2
    assert await store.user_by_name(name) == user
    assert await store.user_by_name("SOMEONE ELSE") == other


async def test_accounts_of_an_older_version_that_look_the_same_stay_apart(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as old:
        old.setattr("db.repository.name_key", str)
        large, small = [await store.create_user(name, "hash") for name in ("JÜRGEN", "jürgen")]
    assert await store.user_by_name("JÜRGEN") == large
    assert await store.user_by_name("jürgen") == small
    assert await store.user_by_name("\uff2aürgen") is None  # which of them?


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
    monkeypatch.setattr("db.sessions.NOTE_USE_EVERY_MS", 0)
    monkeypatch.setattr("db.api_keys.NOTE_USE_EVERY_MS", 0)
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


async def test_a_disabled_user_is_shut_out(store: Store, owner: UserView, stranger: UserView) -> None:
    await store.create_session(stranger.id, "token", soon())
    await store.create_api_key(stranger.id, "laptop", "key")
    await store.create_reset(stranger.id, "reset", soon(), created_by=owner.id)
    await store.create_invitation("invite", soon(), is_admin=False, note="", created_by=stranger.id)
    await store.create_session(stranger.id, "token", soon())
    assert await store.session_user("token") == stranger
    disabled = await store.disable_user(stranger.id)
    assert disabled.disabled_at is not None
    assert await store.disable_user(stranger.id) == disabled
    await store.create_session(stranger.id, "later", soon())
    for token in ("token", "later"):
        assert await store.session_user(token) is None
    assert await store.api_key_user("key") is None
    assert await store.open_link("reset", "reset") is None
    assert await store.open_link("invite", "invite") is None
    with pytest.raises(Conflict, match="the user is disabled"):
        await store.create_reset(stranger.id, "another", soon(), created_by=owner.id)
    assert (await store.enable_user(stranger.id)).disabled_at is None
    assert await store.api_key_user("key") == stranger
    assert await store.open_link("reset", "reset") is None


async def test_the_last_administrator_stays(store: Store, owner: UserView, stranger: UserView) -> None:
    for change in (store.disable_user(owner.id), store.set_admin(owner.id, False)):
        with pytest.raises(Conflict, match="the last administrator must stay one"):
            await change
    assert (await store.set_admin(stranger.id, True)).is_admin
    await store.disable_user(owner.id)
    with pytest.raises(Conflict, match="the last administrator must stay one"):
        await store.set_admin(stranger.id, False)
    assert not (await store.set_admin(owner.id, False)).is_admin  # one who is disabled does not count
    await store.enable_user(owner.id)
    with pytest.raises(Conflict):
        await store.disable_user(stranger.id)


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


async def test_sessions_are_listed_and_ended_by_their_owner(
    store: Store, owner: UserView, stranger: UserView
) -> None:
    first = await store.create_session(
        owner.id, "one", soon(), address="10.0.0.1", user_agent="Firefox " * 99
    )
    await store.create_session(owner.id, "two", soon())
    await store.create_session(owner.id, "over", 1)
    hers = await store.create_session(stranger.id, "hers", soon())
    assert [row.id for row in await store.list_sessions(owner.id)][1] == first.id
    assert (first.address, len(first.user_agent)) == ("10.0.0.1", 300)
    assert await store.session_and_user("one") == (first.id, owner)
    with pytest.raises(NotFound, match="session not found"):
        await store.revoke_session(owner.id, hers.id)
    assert await store.session_user("hers") == stranger
    assert await store.revoke_sessions(owner.id, but=first.id) >= 1
    assert [row.id for row in await store.list_sessions(owner.id)] == [first.id]
    await store.revoke_session(owner.id, first.id)
    assert await store.session_user("one") is None
    assert await store.revoke_sessions(stranger.id) == 1


async def test_an_invitation_works_once(store: Store, owner: UserView) -> None:
    made = await store.create_invitation("t1", soon(), is_admin=True, note=" for Bob ", created_by=owner.id)
    assert (made.note, made.is_admin, made.kind, made.user_id) == ("for Bob", True, "invite", None)
    assert await store.open_link("invite", "t1") == made
    assert await store.open_link("reset", "t1") is None
    with pytest.raises(Conflict, match="that name is taken"):
        await store.accept_invitation("t1", "ADA", "hash")
    takers = [store.accept_invitation("t1", f"taker {number}", "hash") for number in range(5)]
    results = await asyncio.gather(*takers, return_exceptions=True)
    (bob,) = [result for result in results if isinstance(result, UserView)]
    assert bob.is_admin
    assert sum(isinstance(result, NotFound) for result in results) == 4
    assert await store.count_users() == 2
    assert await store.list_links() == []
    late = await store.create_invitation("t2", soon() - 3_600_001, is_admin=False, note="", created_by=None)
    revoked = await store.create_invitation("t3", soon(), is_admin=False, note="", created_by=None)
    assert [row.id for row in await store.list_links()] == [revoked.id]
    assert (await store.revoke_link(revoked.id)).revoked_at is not None
    for token in ("t1", "t2", "t3", "t4"):
        assert await store.open_link("invite", token) is None
        with pytest.raises(NotFound, match="invitation not found"):
            await store.accept_invitation(token, "Eve", "hash")
    assert (await store.revoke_link(late.id)).id == late.id
    with pytest.raises(NotFound, match="link not found"):
        await store.revoke_link("missing")


async def test_a_reset_gives_a_new_password_once(store: Store, owner: UserView, stranger: UserView) -> None:
    await store.create_session(owner.id, "mine", soon())
    await store.create_session(stranger.id, "hers", soon())
    await store.create_reset(owner.id, "first", soon(), created_by=None)
    assert await store.session_user("mine") is None
    await store.create_reset(owner.id, "second", soon(), created_by=None)
    assert await store.open_link("reset", "first") is None
    await store.create_session(owner.id, "meanwhile", soon())
    changed = await store.accept_reset("second", "new hash")
    assert (changed.id, changed.password_hash) == (owner.id, "new hash")
    assert await store.session_user("meanwhile") is None
    assert await store.session_user("hers") == stranger
    for token in ("first", "second", "missing"):
        with pytest.raises(NotFound, match="reset not found"):
            await store.accept_reset(token, "another hash")
    with pytest.raises(NotFound, match="user not found"):
        await store.create_reset("nobody", "x", soon(), created_by=None)


async def test_people_as_an_administrator_sees_them(
    store: Store, owner: UserView, stranger: UserView
) -> None:
    await store.create_session(stranger.id, "token", soon())
    await store.create_api_key(stranger.id, "laptop", "key")
    assert await store.set_quota(stranger.id, QuotaView(running=2)) == QuotaView()
    assert await store.set_quota(stranger.id, QuotaView(per_minute=9)) == QuotaView(running=2)
    ada, eve = await store.list_users()
    assert (ada.name, ada.is_admin, ada.last_seen_at, ada.sessions, ada.api_keys) == ("Ada", True, None, 0, 0)
    assert (eve.name, eve.is_admin, eve.sessions, eve.api_keys) == ("Eve", False, 1, 1)
    assert eve.last_seen_at is not None
    assert eve.quota == QuotaView(per_minute=9)
    assert await store.list_quotas() == {stranger.id: QuotaView(per_minute=9)}
    assert "hash" not in repr(eve)
    for quota in (QuotaView(running=0), QuotaView(waiting=-1), QuotaView(per_minute=10**9)):
        with pytest.raises(InvalidInput, match="must be from"):
            await store.set_quota(stranger.id, quota)
    with pytest.raises(NotFound):
        await store.set_quota("nobody", QuotaView())
