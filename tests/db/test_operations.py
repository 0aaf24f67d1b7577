import pytest

from db import Store
from db.errors import InvalidInput, NotFound
from db.views import UserView


async def test_settings(store: Store) -> None:
    assert await store.get_setting("engine") is None
    assert await store.get_setting("engine", {"retention": 0.5}) == {"retention": 0.5}
    for value in ({"retention": 0.25, "group_size": 16}, [1, "two"], "text", 0, False, None):
        await store.set_setting("engine", value)
        assert await store.get_setting("engine", "default") == value
    with pytest.raises(InvalidInput, match="value: is not JSON"):
        await store.set_setting("engine", {"alpha": float("nan")})
    assert await store.get_setting("engine", "default") is None
    assert await store.get_setting("other") is None


async def test_audit(store: Store, owner: UserView) -> None:
    assert await store.list_audit() == []
    first = await store.add_audit(owner.id, "engine.tune", {"retention": 0.5}, {"retention": 0.25})
    second = await store.add_audit(None, "engine.restart")
    assert (first.user_id, first.action) == (owner.id, "engine.tune")
    assert (first.before, first.after) == ({"retention": 0.5}, {"retention": 0.25})
    assert (second.user_id, second.before, second.after) == (None, None, None)
    assert await store.list_audit() == [second, first]
    assert await store.list_audit(limit=1) == [second]
    with pytest.raises(NotFound, match="user not found"):
        await store.add_audit("nobody", "x")
    with pytest.raises(InvalidInput, match="after: is not JSON"):
        await store.add_audit(None, "x", None, object())
    with pytest.raises(InvalidInput, match="limit: must be at least 1"):
        await store.list_audit(0)


async def test_audit_says_whose_request_it_was_and_is_forgotten_in_time(
    store: Store, owner: UserView
) -> None:
    old = await store.add_audit(owner.id, "sign_in", address="10.0.0.1", request_id="abc")
    assert (old.address, old.request_id) == ("10.0.0.1", "abc")
    new = await store.add_audit(owner.id, "sign_out")
    assert await store.list_audit() == [new, old]
    assert await store.prune_audit(new.created_at) == 1
    assert await store.list_audit() == [new]
