"""Tab "Users": inviting, shutting out, rights, quotas, sign-ins and keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from admin.access import SignedIn
from admin.console import Console
from admin.errors import TuneError
from admin.guarded import guarded
from admin.live_html import button, live_html
from admin.panels import notice, table
from admin.text import ago_text, count_text, time_text
from admin.tuning import number
from app.errors import AppError
from app.people import IssuedLink
from db.errors import DbError
from db.views import LinkView, PersonView, QuotaView, UserView


@dataclass(frozen=True)
class UsersTab:
    """Components and their values."""

    console: Console
    outputs: list[Any]

    async def values(self) -> list[Any]:
        """Values for :attr:`outputs`."""
        people = self.console.services.people
        return [users_table(await people.list_users()), links_table(await people.list_links())]


def users_table(people: list[PersonView]) -> str:
    """Everybody, with buttons for what can be done."""
    head = "<th>Name</th><th>Last seen</th><th class=num>Sign-ins</th><th class=num>Keys</th>"
    head += "<th>Quota</th><th></th>"
    return table("users", head, "".join(_user_row(person) for person in people))


def _user_row(person: PersonView) -> str:
    name = escape(person.id)
    tags = '<span class="tag used">administrator</span>' if person.is_admin else ""
    tags += '<span class="tag bad">disabled</span>' if person.disabled_at else ""
    acts = [("enable", "Enable")] if person.disabled_at else [("disable", "Disable")]
    acts.append(("demote", "Remove administrator") if person.is_admin else ("promote", "Make administrator"))
    acts += [("reset", "Reset password"), ("sessions", "End sign-ins"), ("keys", "Revoke keys")]
    acts.append(("quota", "Quota"))
    buttons = "".join(button(act, name, label) for act, label in acts)
    seen = ago_text(person.last_seen_at)
    return (
        f'<tr data-key="{name}"><td><b>{escape(person.name)}</b> {tags}</td><td>{seen}</td>'
        f'<td class="num">{count_text(person.sessions)}</td>'
        f'<td class="num">{count_text(person.api_keys)}</td>'
        f'<td>{escape(quota_text(person.quota))}</td><td class="acts">{buttons}</td></tr>'
    )


def quota_text(quota: QuotaView) -> str:
    """What a user may do at once; "default" where nothing is set."""
    parts = [
        f"{value} {label}"
        for value, label in (
            (quota.running, "running"),
            (quota.waiting, "waiting"),
            (quota.per_minute, "a minute"),
        )
        if value is not None
    ]
    return ", ".join(parts) or "default"


def links_table(links: list[LinkView]) -> str:
    """Invitations and resets that can still be used."""
    if not links:
        return '<p class="empty">No link is open.</p>'
    body = "".join(
        f'<tr data-key="{escape(link.id)}"><td>{"Invitation" if link.kind == "invite" else "New password"}'
        f"{' of an administrator' if link.is_admin else ''}</td><td>{escape(link.note) or '–'}</td>"
        f"<td>{escape(time_text(link.expires_at / 1000))}</td>"
        f'<td class="acts">{button("revoke", escape(link.id), "Revoke")}</td></tr>'
        for link in links
    )
    return table("links", "<th>Link</th><th>For</th><th>Until</th><th></th>", body)


def link_notice(issued: IssuedLink, base: str) -> str:
    """A link that is shown once, whole, to be copied."""
    url = escape(f"{base}{issued.path}")
    return (
        '<div class="notice good" role="status">It is shown this once, and works once. Send it to them:<br>'
        f'<code class="link">{url}</code></div>'
    )


def whole_or_none(name: str, value: Any) -> int | None:
    """A number of the form; None where the field is empty. Raises :class:`TuneError`."""
    if value is None or value == "":
        return None
    found = number(name, value)
    if found < 0 or found != int(found):
        raise TuneError(f"{name} must be a whole number, 0 or more, or empty for the default.")
    return int(found)


async def attempt(work: Callable[[], Awaitable[str]]) -> str:
    """Do it; a notice of what came of it, or of what was refused."""
    try:
        return await work()
    except (AppError, DbError, TuneError) as error:
        return notice(str(error), "bad")


def build(console: Console) -> UsersTab:
    """Create the components; call inside ``gr.Blocks``."""
    with gr.Column(elem_classes=["tc-panel"]):
        gr.HTML("<h2>Users</h2>", apply_default_css=False)
        said = live_html("users-said")
        users = live_html("users")
        with gr.Column(visible=False, elem_id="quota-form") as quota_form:
            whose = gr.HTML(apply_default_css=False)
            with gr.Row():
                running = gr.Number(None, label="Running at once", elem_id="quota-running")
                waiting = gr.Number(None, label="Waiting", elem_id="quota-waiting")
                per_minute = gr.Number(None, label="A minute", elem_id="quota-minute")
            with gr.Row(elem_classes=["actions"]):
                save = gr.Button("Set quota", variant="primary", size="sm", elem_id="quota-save")
                leave = gr.Button("Cancel", variant="secondary", size="sm")
    with gr.Row(elem_classes=["two", "tune"]):
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>Invite somebody</h2>", apply_default_css=False)
            note = gr.Textbox(
                "",
                label="Whom it is for",
                max_lines=1,
                max_length=200,
                elem_id="invite-note",
                elem_classes=["framed"],
            )
            admin = gr.Checkbox(False, label="As an administrator", elem_id="invite-admin")
            invite = gr.Button("Make a link", variant="primary", size="sm", elem_id="invite-make")
            made = live_html("invite-made")
            with gr.Accordion("Or make an account yourself", open=False, elem_id="create-user"):
                new_name = gr.Textbox(
                    "", label="Name", max_lines=1, elem_classes=["framed"], elem_id="create-name"
                )
                password = gr.Textbox(
                    "",
                    label="Password, to be changed by them",
                    type="password",
                    max_lines=1,
                    elem_classes=["framed"],
                    elem_id="create-password",
                )
                create = gr.Button("Make the account", variant="secondary", size="sm", elem_id="create-make")
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>Open links</h2>", apply_default_css=False)
            links = live_html("links")
    chosen = gr.State("")
    tab = UsersTab(console, [users, links])
    people = console.services.people

    async def act(request: gr.Request, user: Any, event: dict[str, Any]) -> list[Any]:
        what, which = str(event.get("act", "")), str(event.get("name", ""))
        if what == "quota":
            found = next((one for one in await people.list_users() if one.id == which), None)
            if found is None:
                return [
                    notice("There is no such user any more.", "bad"),
                    *[gr.skip()] * 6,
                    *await tab.values(),
                ]
            q = found.quota
            title = f"<h3>Quota of {escape(found.name)}</h3><p class=hint>Empty: the default.</p>"
            shown = [gr.update(visible=True), title, q.running, q.waiting, q.per_minute, which]
            return ["", *shown, *await tab.values()]
        words = await attempt(lambda: done(people, user, what, which, base_of(request)))
        await console.owners.refresh()
        return [words, *[gr.skip()] * 6, *await tab.values()]

    async def set_quota(user: Any, which: str, *numbers: Any) -> list[Any]:
        async def work() -> str:
            names = ("Running at once", "Waiting", "A minute")
            values = [whole_or_none(name, value) for name, value in zip(names, numbers, strict=True)]
            await people.set_quota(user, which, QuotaView(*values))
            return notice("The quota is set.", "good")

        words = await attempt(work)
        return [words, gr.update(visible="bad" in words), *await tab.values()]

    async def make(request: gr.Request, user: Any, whom: str, as_admin: bool) -> list[Any]:
        async def work() -> str:
            issued = await people.invite(user, is_admin=bool(as_admin), note=str(whom))
            return link_notice(issued, base_of(request))

        return [await attempt(work), "", False, *await tab.values()]

    async def make_account(user: Any, name: str, secret: str, as_admin: bool) -> list[Any]:
        async def work() -> str:
            created = await people.create(user, str(name), str(secret), is_admin=bool(as_admin))
            return notice(f"{created.name} can sign in now.", "good")

        words = await attempt(work)
        settled = "notice bad" not in words
        await console.owners.refresh()
        return [words, "" if settled else name, "", False if settled else as_admin, *await tab.values()]

    async def revoke(user: Any, event: dict[str, Any]) -> list[Any]:
        async def work() -> str:
            await people.revoke_link(user, str(event.get("name", "")))
            return notice("The link does not work any more.", "good")

        return [await attempt(work), *await tab.values()]

    async def hide() -> Any:
        return gr.update(visible=False)

    access = console.access
    options: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
    everything: dict[str, Any] = {"with_user": True, "with_event": True}
    fields = [running, waiting, per_minute]
    users.act(
        guarded(access, act, **everything, with_request=True),
        None,
        [said, quota_form, whose, *fields, chosen, *tab.outputs],
        **options,
    )
    save.click(
        guarded(access, set_quota, with_user=True),
        [chosen, *fields],
        [said, quota_form, *tab.outputs],
        **options,
    )
    leave.click(guarded(access, hide), None, [quota_form], **options)
    invite.click(
        guarded(access, make, with_user=True, with_request=True),
        [note, admin],
        [made, note, admin, *tab.outputs],
        trigger_mode="once",
        **options,
    )
    create.click(
        guarded(access, make_account, with_user=True),
        [new_name, password, admin],
        [made, new_name, password, admin, *tab.outputs],
        trigger_mode="once",
        **options,
    )
    links.act(guarded(access, revoke, **everything), None, [made, *tab.outputs], **options)
    return tab


async def done(people: Any, user: SignedIn | UserView, what: str, which: str, base: str) -> str:
    """Carry out one button; what to say."""
    if what == "reset":
        return link_notice(await people.reset_password(user, which), base)
    if what == "sessions":
        return notice(f"Ended {await people.end_sessions(user, which)} sign-ins.", "good")
    if what == "keys":
        return notice(f"Revoked {await people.revoke_keys(user, which)} keys.", "good")
    if what in ("promote", "demote"):
        changed = await people.set_admin(user, which, what == "promote")
        rights = "an administrator now" if changed.is_admin else "no administrator any more"
        return notice(f"{changed.name} is {rights}.", "good")
    if what in ("disable", "enable"):
        changed = await (people.disable if what == "disable" else people.enable)(user, which)
        return notice(f"{changed.name} is {'shut out' if what == 'disable' else 'let in again'}.", "good")
    raise TuneError("The page is of another version. Load it again.")


def base_of(request: gr.Request) -> str:
    """The address that the administrator's browser uses."""
    connection = request.request
    return str(connection.base_url).rstrip("/").removesuffix("/admin") if connection is not None else ""
