"""Sign-in, sign-out and first-run setup, as pages with forms."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from app.accounts import COOKIE, SignIn, is_local, user_of
from app.errors import AppError
from app.routes.deps import ServicesDep
from app.ui.pages import login_page, setup_page
from db.errors import Conflict, InvalidInput

router = APIRouter()

Field = Annotated[str, Form()]


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
        signed_in = await services.accounts.sign_in(name, password, client=_client(request))
    except AppError as error:
        return HTMLResponse(login_page(error.message, name=name), status_code=error.status)
    return _welcome(request, signed_in)


@router.get("/setup")
async def show_setup(request: Request, services: ServicesDep) -> Response:
    if not await services.accounts.needs_setup():
        return _to("/login")
    return HTMLResponse(setup_page(needs_key=not is_local(request)))


@router.post("/setup")
async def setup(
    request: Request, services: ServicesDep, name: Field = "", password: Field = "", key: Field = ""
) -> Response:
    local = is_local(request)
    try:
        signed_in = await services.accounts.set_up(
            name, password, key=key.strip(), local=local, client=_client(request)
        )
    except AppError as error:
        return HTMLResponse(
            setup_page(error.message, name=name, needs_key=not local), status_code=error.status
        )
    except InvalidInput as error:
        return HTMLResponse(setup_page(str(error), name=name, needs_key=not local), status_code=400)
    except Conflict:  # somebody else was quicker
        return _to("/login")
    return _welcome(request, signed_in)


@router.post("/logout")
async def logout(request: Request, services: ServicesDep) -> Response:
    if token := request.cookies.get(COOKIE):
        await services.accounts.sign_out(token)
    answer = _to("/login")
    answer.delete_cookie(COOKIE, path="/")
    return answer


def _welcome(request: Request, signed_in: SignIn) -> Response:
    answer = _to("/")
    answer.set_cookie(
        COOKIE,
        signed_in.token,
        max_age=signed_in.max_age,
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="lax",
    )
    return answer


def _to(path: str) -> RedirectResponse:
    return RedirectResponse(path, status_code=303)


def _client(request: Request) -> str:
    return request.client.host if request.client else ""
