"""What routes ask for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from app.accounts import current_admin, current_user, session_of
from app.services import Services
from db.views import UserView


def services_of(connection: HTTPConnection) -> Services:
    services = connection.app.state.services
    if not isinstance(services, Services):
        raise TypeError("the app was not made by create_app")
    return services


ServicesDep = Annotated[Services, Depends(services_of)]
User = Annotated[UserView, Depends(current_user)]
Admin = Annotated[UserView, Depends(current_admin)]
SessionId = Annotated[str, Depends(session_of)]
"""Asks for a sign-in with name and password: an API key does not do."""
