"""Who is asking: first start, sign-ins, API keys. Only hashes of secrets reach the database."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
import unicodedata
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from app.audit import AuditLog
from app.errors import BadRequest, Forbidden, NotSignedIn
from app.passwords import Passwords, check_new, check_new_password
from app.request_context import CURRENT
from app.throttle import Throttle
from db.store import Store
from db.views import ApiKeyView, UserView

COOKIE = "tangram_session"
KEY_PREFIX = "tc-"
SETUP_SECONDS = 24 * 3600.0
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")


@dataclass(frozen=True, slots=True)
class SignIn:
    """A new sign-in: the cookie's value, and how long it lasts in seconds."""

    user: UserView
    token: str
    max_age: int


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a request comes from. session_id: the sign-in that it was made with, None with an API key."""

    user: UserView
    session_id: str | None


@dataclass(frozen=True, slots=True)
class Browser:
    """What a sign-in is remembered with. token: the session cookie that came with it, which ends."""

    address: str = ""
    user_agent: str = ""
    token: str = ""


class Accounts:
    """Signs people in and out and recognises them.

    setup_key: what the first account asks for; printed once at start, in a link that works for a day.
    """

    def __init__(
        self,
        store: Store,
        passwords: Passwords,
        audit: AuditLog,
        *,
        session_days: int = 30,
        setup_key: str = "",
    ) -> None:
        self._store = store
        self._passwords = passwords
        self._audit = audit
        self._session_seconds = session_days * 86400
        self._throttle = Throttle(limit=10, window=300.0)
        self._by_address = Throttle(limit=30, window=300.0)
        self._by_name = Throttle(limit=30, window=900.0)
        self._has_users = False
        self._setup_until = time.monotonic() + SETUP_SECONDS
        self.setup_key = setup_key or secrets.token_urlsafe(24)

    # ---- first start -------------------------------------------------------------------------

    async def needs_setup(self) -> bool:
        """Whether there is no account yet."""
        if not self._has_users:
            self._has_users = await self._store.count_users() > 0
        return not self._has_users

    async def set_up(self, name: str, password: str, *, key: str, browser: Browser) -> SignIn:
        """Create the administrator and sign in. Raises Forbidden, BadRequest, TooManyAttempts, Conflict."""
        if not await self.needs_setup():
            raise Forbidden("This server has its administrator already. Sign in instead.")
        network = network_of(browser.address)
        self._throttle.check(network)
        if not hmac.compare_digest(key.encode(), self.setup_key.encode()):
            self._throttle.note(network)
            await self._audit.record(None, "setup.failed")
            raise Forbidden("That is not the setup key. The server printed it, in a link, when it started.")
        if time.monotonic() > self._setup_until:
            raise Forbidden("The setup link has expired. Restart the server: it prints another one.")
        check_new(name, password)
        hashed = await self._passwords.hash(password)
        user = await self._store.create_first_user(name.strip(), hashed)
        await self._audit.record(user.id, "user.create", None, {"name": user.name, "is_admin": True})
        return await self.welcome(user, browser)

    async def create_user(self, name: str, password: str, *, is_admin: bool = False) -> UserView:
        """Add an account without an invitation. Raises BadRequest, Conflict (db)."""
        check_new(name, password)
        hashed = await self._passwords.hash(password)
        user = await self._store.create_user(name.strip(), hashed, is_admin)
        await self._audit.record(None, "user.create", None, {"name": user.name, "is_admin": is_admin})
        return user

    # ---- sign-in -----------------------------------------------------------------------------

    async def sign_in(self, name: str, password: str, *, browser: Browser) -> SignIn:
        """Check a password and open a session. Raises NotSignedIn, TooManyAttempts.

        An unknown name takes as long as a wrong password.
        """
        name = name.strip()
        network, key = network_of(browser.address), _name_key(name)
        source = f"{network} {key}"
        self._throttle.check(source)
        self._by_address.check(network)
        self._throttle.note(source)
        self._by_address.note(network)
        user = await self._store.user_by_name(name) if 0 < len(name) <= 64 else None
        # Guesses from many addresses count together, but shut nobody out where they signed in before.
        counted = not await self._is_known(user.id if user else "", network)
        if counted:
            self._by_name.check(key)
            self._by_name.note(key)
        usable = user is not None and user.disabled_at is None
        matches = await self._passwords.verify(user.password_hash if user and usable else None, password)
        if user is None or not usable or not matches:
            # Nobody's act: it is not known who typed. An unknown name may be a password in the wrong field.
            known = {"user_id": user.id, "disabled": not usable} if user is not None else None
            await self._audit.record(None, "sign_in.failed", None, known)
            raise NotSignedIn("The name or the password is wrong.")
        self._throttle.forget(source)
        self._by_address.undo(network)
        if counted:
            self._by_name.undo(key)
        if self._passwords.is_outdated(user.password_hash):
            hashed = await self._passwords.hash(password)
            await self._store.set_password_hash(user.id, hashed, end_sessions=False)
        return await self.welcome(user, browser)

    async def _is_known(self, user_id: str, network: str) -> bool:
        """Whether a session of the user began in that network and goes on."""
        sessions = await self._store.list_sessions(user_id)
        return any(network_of(session.address) == network for session in sessions if session.address)

    async def welcome(self, user: UserView, browser: Browser) -> SignIn:
        """Open a session for somebody whose right to it was just checked.

        Its token is always new, and a session that the browser had before ends: neither a token that somebody
        planted nor one that leaked earlier becomes this one.
        """
        if browser.token:
            await self._store.delete_session(digest(browser.token))
        token = secrets.token_urlsafe(32)
        expires = int(time.time() + self._session_seconds) * 1000
        await self._store.create_session(
            user.id, digest(token), expires, address=browser.address, user_agent=browser.user_agent
        )
        await self._audit.record(user.id, "sign_in")
        return SignIn(user, token, self._session_seconds)

    async def sign_out(self, token: str) -> None:
        """End the session of a cookie."""
        found = await self._store.session_user(digest(token))
        await self._store.delete_session(digest(token))
        if found is not None:
            await self._audit.record(found.id, "sign_out")

    async def change_password(self, user: UserView, current: str, new: str, *, browser: Browser) -> SignIn:
        """Give a user another password, end all of the user's sessions, and open this browser's anew.

        Raises BadRequest for a wrong current or an unfit new password, TooManyAttempts.
        """
        source = f"password of {user.id}"
        self._throttle.check(source)
        check_new_password(new)
        self._throttle.note(source)
        if not await self._passwords.verify(user.password_hash, current):
            await self._audit.record(user.id, "password.failed")
            raise BadRequest("The current password is wrong.", param="current")
        self._throttle.forget(source)
        await self._store.set_password_hash(user.id, await self._passwords.hash(new))
        await self._audit.record(user.id, "password.change")
        return await self.welcome(user, browser)

    # ---- recognising -------------------------------------------------------------------------

    async def identify(self, connection: HTTPConnection) -> UserView | None:
        """The user of a request, by its API key or its session cookie."""
        identity = await self.recognise(connection)
        return identity.user if identity is not None else None

    async def recognise(self, connection: HTTPConnection) -> Identity | None:
        """As `identify`, and by which of the two. No cookie makes up for a key that is sent and wrong."""
        scheme, _, key = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            user = await self._store.api_key_user(digest(key.strip()))
            return Identity(user, None) if user is not None else None
        token = connection.cookies.get(COOKIE)
        found = await self._store.session_and_user(digest(token)) if token else None
        return Identity(found[1], found[0]) if found is not None else None

    # ---- what is one's own -------------------------------------------------------------------

    async def create_api_key(self, owner: str, name: str) -> tuple[str, ApiKeyView]:
        """(the key, which nobody can read again; its record)."""
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        record = await self._store.create_api_key(owner, name, digest(key))
        await self._audit.record(owner, "api_key.create", None, {"id": record.id, "name": record.name})
        return key, record

    async def revoke_api_key(self, owner: str, key_id: str) -> None:
        """Refuse an own key from now on. Raises NotFound."""
        record = await self._store.revoke_api_key(owner, key_id)
        await self._audit.record(owner, "api_key.revoke", {"id": record.id, "name": record.name})

    async def revoke_session(self, owner: str, session_id: str) -> None:
        """End one of one's own sign-ins. Raises NotFound."""
        await self._store.revoke_session(owner, session_id)
        await self._audit.record(owner, "session.revoke", {"id": session_id})

    async def revoke_other_sessions(self, owner: str, session_id: str) -> int:
        """End all of one's own sign-ins but this; return how many there were."""
        count = await self._store.revoke_sessions(owner, session_id)
        await self._audit.record(owner, "session.revoke", {"others": count})
        return count


def digest(secret: str) -> str:
    """The secrets are random and long, so that a plain hash is enough to keep them."""
    return hashlib.sha256(secret.encode()).hexdigest()


# ---- what a request carries ------------------------------------------------------------------


def remember(connection: HTTPConnection, identity: Identity | None) -> None:
    """Note on a request who sent it, for `user_of` and the log."""
    state = connection.scope.setdefault("state", {})
    state["user"] = identity.user if identity is not None else None
    state["session_id"] = identity.session_id if identity is not None else None
    info = CURRENT.get()
    if info is not None and identity is not None:
        info.user_id = identity.user.id


def browser_of(connection: HTTPConnection) -> Browser:
    """What a sign-in by this request is to be remembered with."""
    return Browser(
        address=connection.client.host if connection.client else "",
        user_agent=connection.headers.get("user-agent", ""),
        token=connection.cookies.get(COOKIE, ""),
    )


def user_of(connection: HTTPConnection) -> UserView | None:
    """The user that `app.middleware.Identify` found, or None."""
    user = connection.scope.get("state", {}).get("user")
    return user if isinstance(user, UserView) else None


def current_user(connection: HTTPConnection) -> UserView:
    """FastAPI dependency: the user, or NotSignedIn."""
    user = user_of(connection)
    if user is None:
        raise NotSignedIn
    return user


def current_admin(connection: HTTPConnection) -> UserView:
    """FastAPI dependency: the user if an administrator, else NotSignedIn or Forbidden."""
    user = current_user(connection)
    if not user.is_admin:
        raise Forbidden("Only administrators may do this.")
    return user


def session_of(connection: HTTPConnection) -> str:
    """FastAPI dependency: the id of the sign-in, or NotSignedIn, or Forbidden with an API key.

    For what a key that leaked must not be able to do: change the account, or make further keys.
    """
    current_user(connection)
    session_id = connection.scope.get("state", {}).get("session_id")
    if not isinstance(session_id, str):
        raise Forbidden("An API key cannot do this. Sign in with name and password.")
    return session_id


async def auth_dependency(request: HTTPConnection) -> str | None:
    """For Gradio's `auth_dependency`: the user's id, which handlers then read from `request.username`."""
    user = user_of(request)
    return user.id if user is not None else None


async def admin_dependency(request: HTTPConnection) -> str | None:
    """As `auth_dependency`, for pages of administrators."""
    user = user_of(request)
    return user.id if user is not None and user.is_admin else None


def is_local(connection: HTTPConnection) -> bool:
    """Whether the request comes from this machine and was addressed to it by a loopback name.

    The second half keeps out web pages that make a browser here talk to us under a foreign name. What came
    through a proxy is never local, whatever address it gives: the proxy may serve the whole network.
    """
    if any(name in connection.headers for name in _FORWARDED):
        return False
    host = connection.url.hostname or ""
    return _is_loopback(connection.client.host if connection.client else "") and (
        host == "localhost" or _is_loopback(host)
    )


def network_of(address: str) -> str:
    """What guesses are counted by: an IPv4 address, or the /64 of an IPv6 one, which one subscriber has."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def _name_key(name: str) -> str:
    """A name as guesses are counted by it: at least all spellings that the store takes for the same."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())[:100]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
