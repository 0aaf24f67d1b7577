"""Sign-in, sign-out, and the links that make accounts, as pages with forms."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from app.accounts import COOKIE, SignIn, browser_of, user_of
from app.errors import AppError
from app.routes.deps import ServicesDep
from app.routes.forms import Field, refused
from app.ui.pages import invite_page, login_page, reset_page, setup_page, spent_page
from db.errors import Conflict, InvalidInput

router = APIRouter()


@router.get("/login")
async def show_login(request: Request, services: ServicesDep) -> Response:
    if user_of(request) is not None:
        return _to("/")
    if await services.accounts.needs_setup():
        return _to("/setup")
    return HTMLResponse(login_page())


@router.post("/login")
async def login(request: Request, services: ServicesDep, name: Field = "", password: Field = "") -> Response:
    try:
        signed_in = await services.accounts.sign_in(name, password, browser=browser_of(request))
    except AppError as error:
        return refused(login_page(error.message, name=name), error)
    return _welcome(request, signed_in)


@router.get("/setup")
async def show_setup(services: ServicesDep, key: str = "") -> Response:
    if not await services.accounts.needs_setup():
        return _to("/login")
    return HTMLResponse(setup_page(key=key))


@router.post("/setup")
async def setup(
    request: Request, services: ServicesDep, name: Field = "", password: Field = "", key: Field = ""
) -> Response:
    try:
        signed_in = await services.accounts.set_up(
            name, password, key=key.strip(), browser=browser_of(request)
        )
    except AppError as error:
        return refused(setup_page(error.message, name=name, key=key), error)
    except InvalidInput as error:
        return HTMLResponse(setup_page(str(error), name=name, key=key), status_code=400)
    except Conflict:  # somebody else was quicker
        return _to("/login")
    return _welcome(request, signed_in)


@router.get("/invite")
async def show_invitation(services: ServicesDep, token: str = "") -> Response:
    try:
        await services.people.find_link("invite", token)
    except AppError as error:
        return HTMLResponse(spent_page(error.message), status_code=error.status)
    return HTMLResponse(invite_page(token))


@router.post("/invite")
async def accept_invitation(
    request: Request, services: ServicesDep, name: Field = "", password: Field = "", token: Field = ""
) -> Response:
    try:
        user = await services.people.accept_invitation(token, name, password)
    except AppError as error:
        if error.status == 404:
            return HTMLResponse(spent_page(error.message), status_code=404)
        return refused(invite_page(token, error.message, name=name), error)
    except (InvalidInput, Conflict) as error:
        text = f"{error}.".capitalize()
        status = 409 if isinstance(error, Conflict) else 400
        return HTMLResponse(invite_page(token, text, name=name), status_code=status)
    return _welcome(request, await services.accounts.welcome(user, browser_of(request)))


@router.get("/reset")
async def show_reset(services: ServicesDep, token: str = "") -> Response:
    try:
        await services.people.find_link("reset", token)
    except AppError as error:
        return HTMLResponse(spent_page(error.message), status_code=error.status)
    return HTMLResponse(reset_page(token))


@router.post("/reset")
async def accept_reset(
    request: Request, services: ServicesDep, password: Field = "", token: Field = ""
) -> Response:
    try:
        user = await services.people.accept_reset(token, password)
    except AppError as error:
        if error.status == 404:
            return HTMLResponse(spent_page(error.message), status_code=404)
        return refused(reset_page(token, error.message), error)
    return _welcome(request, await services.accounts.welcome(user, browser_of(request)))


@router.post("/logout")
async def logout(request: Request, services: ServicesDep) -> Response:
    if token := request.cookies.get(COOKIE):
        await services.accounts.sign_out(token)
    answer = _to("/login")
    answer.delete_cookie(COOKIE, path="/")
    return answer


def set_cookie(request: Request, answer: Response, signed_in: SignIn) -> None:
    """Give the browser its session: for no script and no other site, and over TLS only if it came so."""
    answer.set_cookie(
        COOKIE,
        signed_in.token,
        max_age=signed_in.max_age,
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="lax",
    )


def _welcome(request: Request, signed_in: SignIn) -> Response:
    answer = _to("/")
    set_cookie(request, answer, signed_in)
    return answer


def _to(path: str) -> RedirectResponse:
    return RedirectResponse(path, status_code=303)
