"""The objects that make up the product, as the HTTP routes and the Gradio pages share them."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.accounts import Accounts
from app.active import ActiveRequests
from app.audit import AuditLog
from app.backups import Backups
from app.calibration import Calibration
from app.engine_change import EngineChanges
from app.engine_settings import EngineSettings
from app.evaluation import Evaluation
from app.fairness import FairQueue
from app.generation import GenerationService
from app.metrics import Metrics
from app.people import People
from app.profiles import Profiles
from app.ranks import Ranks
from app.reply_memory import ReplyMemory
from app.settings import Settings
from app.supervisor import EngineSupervisor
from app.templating import Templating
from app.tokenising import Tokenising
from db.database import Database
from db.store import Store
from tangram.client import EngineClient


@dataclass(frozen=True)
class Services:
    """One per process, made by `app.factory.create_app`, alive for the length of its lifespan.

    supervisor.status    EngineStatus(state, phase, detail, model, since, restarts, ...), never raises
    supervisor.restart   restarts with other settings, or goes back and raises EngineStartFailed
    supervisor.log_tail  the last lines of the engine's log, redacted
    engine_settings      what administrators decided, and the only way to change it
    changes              runs such changes one at a time, and knows how the last ones ended
    """

    settings: Settings
    database: Database
    store: Store
    supervisor: EngineSupervisor
    engine_settings: EngineSettings
    changes: EngineChanges
    profiles: Profiles
    calibration: Calibration
    evaluation: Evaluation
    generation: GenerationService
    accounts: Accounts
    metrics: Metrics
    people: People
    queue: FairQueue
    audit: AuditLog
    active: ActiveRequests
    tokenising: Tokenising
    backups: Backups
    ranks: Ranks
    reply_memory: ReplyMemory = field(default_factory=ReplyMemory)

    @property
    def engine(self) -> EngineClient:
        """The client of the running engine. Raises EngineNotReady while there is none."""
        return self.supervisor.client

    @property
    def templating(self) -> Templating:
        """Tokenizer and chat template of the served model. Raises EngineNotReady until they are loaded."""
        return self.supervisor.templating
