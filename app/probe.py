"""A quick look at whether the engine still finds details: facts that look alike, and questions about them.

No measure of quality (benchmarks/accuracy is one): it tells a profile that ruins recall, or an engine that
answers nonsense, from one that works, within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import secrets
import time
from dataclasses import dataclass

from app.errors import AppError
from app.supervisor import EngineSupervisor
from tangram.calibration.lookalikes import Fact, lookalikes
from tangram.client import CompletionRequest
from tangram.errors import TangramError

QUESTIONS = 6
LINES = 64
"""About a thousand tokens: more than a chunk and its window, so that something is sealed."""
ANSWER_TOKENS = 12
TIMEOUT_SECONDS = 180.0
MUTE = (
    "This model cannot answer the quick check even with everything kept (0 of {asked}), so it tells only "
    "that the engine answers. Trying a profile in the tab Profiles compares the loss instead."
)
TELLING = 3
"""Right answers from which on a fall to less than half tells something: one or two of six come by chance."""
_SEED = 20260606
SHORT_SHARE = 0.5
"""Of the tokens that are never sealed, so many may the shorter text take that is asked about when nothing was
found: what is kept then decides nothing."""


@dataclass(frozen=True)
class ProbeResult:
    """right: questions of ``asked`` whose answer had the number. error: why there was no answer.

    unsealed: of as many questions about a text so short that everything is kept; None where that was not
    asked, as something was found.
    """

    right: int = 0
    asked: int = 0
    seconds: float = 0.0
    error: str = ""
    unsealed: int | None = None

    @property
    def mute(self) -> bool:
        """Whether the model cannot answer even with everything kept: what is kept is then not told."""
        return not self.error and self.right == 0 and self.unsealed == 0

    def told(self) -> str:
        """In words."""
        return self.error or f"{self.right} of {self.asked}"


def worse(before: ProbeResult | None, after: ProbeResult | None) -> bool:
    """Whether a change must be taken back: the engine does not answer, or finds less than half of before,
    where that was enough to tell."""
    if after is None or after.error:
        return after is not None
    found = before.right if before is not None and not before.error else 0
    return found >= TELLING and 2 * after.right < found


def probed_text(found: tuple[ProbeResult | None, ProbeResult | None]) -> str:
    """What a change did to it, as a sentence to follow another; "" where nothing was asked."""
    before, after = found
    if after is None:
        return ""
    if after.mute:
        return f" {MUTE.format(asked=after.asked)}"
    earlier = f", before the change {before.told()}" if before is not None else ""
    more = ""
    if after.unsealed:
        more = f" Of a text so short that everything is kept it finds {after.unsealed} of {after.asked}."
    return f" Details found in a quick check: {after.told()}{earlier}.{more}"


class Probe:
    """Asks the engine that runs."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self._supervisor = supervisor

    async def __call__(self) -> ProbeResult | None:
        """None where there is no engine to ask, or its context is too short."""
        if not self._supervisor.status.ready:
            return None
        began = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await self._ask(began)
        except (AppError, TangramError, TimeoutError) as error:
            took = time.monotonic() - began
            return ProbeResult(seconds=took, error=f"no answer: {str(error) or 'it took too long'}")

    async def _ask(self, began: float) -> ProbeResult | None:
        right = await self._right_of(LINES)
        if right is None:
            return None
        unsealed = await self._right_of(await self._short()) if not right else None
        return ProbeResult(right, QUESTIONS, time.monotonic() - began, unsealed=unsealed)

    async def _short(self) -> int:
        """How many facts stay raw, whatever the budgets; at least as many as there are questions."""
        geometry = self._supervisor.geometry
        if geometry is None:
            return QUESTIONS
        text, asked = facts(LINES)
        raw, whole = geometry.chunk + geometry.window, len(await self._prompt(text, asked[0]))
        return max(QUESTIONS, min(LINES, int(SHORT_SHARE * raw * LINES / whole)))

    async def _prompt(self, text: str, fact: Fact) -> list[int]:
        message = {"role": "user", "content": f"{text}\n\n{fact.question}"}
        templating = self._supervisor.templating
        prompt = await asyncio.to_thread(templating.render, [message], [])
        return [*prompt, *await asyncio.to_thread(templating.text.encode, fact.lead)]

    async def _right_of(self, count: int) -> int | None:
        """Right answers about so many facts; None where the model's context is too short."""
        engine, templating = self._supervisor.client, self._supervisor.templating
        text, asked = facts(count)
        salt, names, right = secrets.token_hex(8), [], 0
        for fact in asked:
            prompt = await self._prompt(text, fact)
            if len(prompt) + ANSWER_TOKENS > self._supervisor.status.max_model_len:
                return None
            names.append(secrets.token_hex(12))
            request = CompletionRequest(
                self._supervisor.status.model,
                prompt,
                ANSWER_TOKENS,
                temperature=0.0,
                stop_token_ids=templating.stop_token_ids,
                cache_salt=salt,
                request_id=names[-1],
                rank=0 if self._supervisor.ranks > 1 else None,  # where the text is in the cache already
            )
            async with contextlib.aclosing(engine.stream(request)) as chunks:
                answer = "".join([chunk.text async for chunk in chunks])
            right += re.search(rf"\b{fact.code}\b", answer) is not None
        with contextlib.suppress(TangramError):
            for row in (await engine.memory()).get("sequences", []):
                if any(name in row["id"] for name in names):
                    await engine.evict(sequence=row["id"])
        return right


def facts(count: int) -> tuple[str, list[Fact]]:
    """A text of facts that differ in little, and those that are asked about, spread over it."""
    every = lookalikes(random.Random(_SEED), count)
    asked = [every[round((index + 0.5) * count / QUESTIONS)] for index in range(QUESTIONS)]
    return "\n".join(fact.sentence for fact in every), asked
