"""Profiles and their calibration, for administrators, under /api/admin."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from app.calibration import RETENTIONS
from app.calibration_record import CalibrationRecord
from app.engine_change import EngineChange
from app.errors import Missing
from app.profiles import ProfileEntry
from app.routes.deps import Admin, ServicesDep
from app.routes.json_body import JsonBody

router = APIRouter(prefix="/api/admin")


class NewCalibration(JsonBody):
    """Options of `tangram calibrate`; the command checks them further."""

    retention: list[float] = Field(default=list(RETENTIONS), min_length=1, max_length=8)
    samples: int = Field(default=50, ge=1, le=1000)
    oracle: Literal["kvzip", "keydiff", "expected_attention", "snapkv"] = "kvzip"
    scope: Literal["model", "layer"] = "model"
    alpha: float = 1.0
    data: Literal["builtin", "conversations", "uploaded"] = "builtin"
    length: int = 3072
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"


class Choice(JsonBody):
    profile: str = Field(min_length=1, max_length=300)


class NewEvaluation(Choice):
    """other: a profile, or `none`; by default what the engine runs with."""

    other: str | None = Field(default=None, min_length=1, max_length=300)


@router.get("/profiles")
async def list_profiles(admin: Admin, services: ServicesDep) -> dict[str, Any]:
    """All profiles, which one the engine runs with, and which one it is started with next."""
    profiles = services.profiles
    in_force = await profiles.in_force()
    return {
        "profiles": [_entry_json(entry, in_force) for entry in await profiles.every()],
        "in_force": in_force,
        "chosen": await profiles.chosen(),
        "before": await profiles.before(),
        "activation": _activation_json(profiles.activation),
    }


@router.get("/profiles/{name}")
async def get_profile(name: str, admin: Admin, services: ServicesDep) -> dict[str, Any]:
    """One profile, with what its samples advise."""
    entry = await services.profiles.entry(name)
    body = _entry_json(entry, await services.profiles.in_force())
    return body if entry.problem else body | {"advice": await services.profiles.advice(name)}


@router.get("/profiles/{name}/compare")
async def compare_profiles(
    name: str,
    admin: Admin,
    services: ServicesDep,
    other: Annotated[str, Query(max_length=300)],
    retention: float = 0.5,
    alpha: float = 1.0,
) -> dict[str, Any]:
    """How the budgets of two profiles differ."""
    return await services.profiles.compare(name, other, retention, alpha)


@router.get("/profiles/{name}/evaluations")
async def get_evaluations(name: str, admin: Admin, services: ServicesDep) -> dict[str, Any]:
    """What was found when the profile was tried, by the name of the other one."""
    return await services.evaluation.results(name)


@router.delete("/profiles/{name}", status_code=204)
async def discard_profile(name: str, admin: Admin, services: ServicesDep) -> Response:
    await services.profiles.discard(admin.id, name)
    return Response(status_code=204)


@router.post("/profile", status_code=202)
async def choose_profile(body: Choice, admin: Admin, services: ServicesDep) -> dict[str, Any]:
    """Restart the engine with a profile: a name, `auto` or `none`. The list of profiles tells how it goes."""
    return {"activation": _activation_json(await services.profiles.activate(admin.id, body.profile))}


@router.post("/profile/back", status_code=202)
async def go_back(admin: Admin, services: ServicesDep) -> dict[str, Any]:
    """Restart the engine with the profile that was chosen before."""
    return {"activation": _activation_json(await services.profiles.go_back(admin.id))}


@router.get("/calibration")
async def get_calibration(admin: Admin, services: ServicesDep, log: int = 0) -> dict[str, Any]:
    """The last calibration; with `log`, so many lines of its output."""
    record = services.calibration.record
    if record is None:
        raise Missing("There is no calibration.")
    body = _record_json(record)
    return body | {"log": services.calibration.log_tail(min(log, 1000))} if log > 0 else body


@router.post("/calibration", status_code=202)
async def start_calibration(body: NewCalibration, admin: Admin, services: ServicesDep) -> dict[str, Any]:
    """Begin a calibration of the served model."""
    return _record_json(await services.calibration.start(admin.id, body.model_dump()))


@router.post("/calibration/cancel")
async def cancel_calibration(admin: Admin, services: ServicesDep) -> dict[str, Any]:
    return _record_json(await services.calibration.cancel(admin.id))


@router.post("/calibration/resume", status_code=202)
async def resume_calibration(admin: Admin, services: ServicesDep) -> dict[str, Any]:
    return _record_json(await services.calibration.resume(admin.id))


@router.delete("/calibration", status_code=204)
async def discard_calibration(admin: Admin, services: ServicesDep) -> Response:
    """Forget a calibration that is not complete, and what it found."""
    await services.calibration.discard(admin.id)
    return Response(status_code=204)


@router.get("/evaluation")
async def get_evaluation(admin: Admin, services: ServicesDep) -> dict[str, Any]:
    """How far the last evaluation is, or how it ended."""
    if services.evaluation.record is None:
        raise Missing("No profile was tried since the app started.")
    return asdict(services.evaluation.record)


@router.post("/evaluation", status_code=202)
async def start_evaluation(body: NewEvaluation, admin: Admin, services: ServicesDep) -> dict[str, Any]:
    """Begin to try a profile against another one, beside the engine."""
    return asdict(await services.evaluation.start(admin.id, body.profile, body.other))


@router.post("/evaluation/cancel")
async def cancel_evaluation(admin: Admin, services: ServicesDep) -> dict[str, Any]:
    return asdict(await services.evaluation.cancel(admin.id))


def _entry_json(entry: ProfileEntry, in_force: str | None) -> dict[str, Any]:
    return {
        "name": entry.name,
        "shipped": entry.shipped,
        "in_force": str(entry.path) == in_force,
        "problem": entry.problem or None,
        "about": entry.about,
    }


def _activation_json(activation: EngineChange | None) -> dict[str, Any] | None:
    if activation is None:
        return None
    return {
        "profile": activation.to,
        "outcome": activation.outcome,
        "message": activation.message,
        "seconds": round(activation.elapsed, 1),
    }


def _record_json(record: CalibrationRecord) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if name != "source"}
