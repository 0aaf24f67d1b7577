"""The console's moving parts, shared by its pages."""

from __future__ import annotations

from dataclasses import dataclass

from admin.access import Access
from admin.owners import Owners
from admin.render import Renderer
from admin.sampler import Sampler
from admin.tuning import TuneService
from admin.watch import Watch
from app.calibration import Calibration
from app.engine_change import EngineChanges
from app.profiles import Profiles
from app.services import Services
from app.supervisor import EngineSupervisor


@dataclass(frozen=True)
class Console:
    """Everything that a page or a handler needs."""

    access: Access
    sampler: Sampler
    renderer: Renderer
    tuning: TuneService
    engine: EngineSupervisor
    profiles: Profiles
    calibration: Calibration
    services: Services
    owners: Owners
    watch: Watch
    changes: EngineChanges
