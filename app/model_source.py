"""Finds the model to serve: the bundled one, a directory, or a hub id, and loads its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app import bundled_model
from app.errors import ModelUnusable
from app.settings import Settings
from app.templating import Templating
from app.tokenizer import load_model_text


@dataclass(frozen=True)
class ServedModel:
    """source: what the engine is told to load. name: what clients call it. bundled: nobody chose another."""

    source: str
    name: str
    templating: Templating
    bundled: bool = False


async def open_model(settings: Settings, progress: Callable[[str], None]) -> ServedModel:
    """Prepare the model's files and load its tokenizer, off the event loop. Raises ModelUnusable."""
    loop = asyncio.get_running_loop()

    def tell(text: str) -> None:
        loop.call_soon_threadsafe(progress, text)

    return await asyncio.to_thread(_open, settings, tell)


def _open(settings: Settings, progress: Callable[[str], None]) -> ServedModel:
    if settings.model:
        folder = Path(settings.model).expanduser()
        source = str(folder) if folder.is_dir() else settings.model
        name = folder.resolve().name if folder.is_dir() else settings.model
    else:
        try:
            source = str(bundled_model.prepare(settings.models_dir, progress))
        except bundled_model.BundledModelError as error:
            raise ModelUnusable(str(error)) from error
        name = bundled_model.DEFAULT_NAME
    progress("reading the tokenizer")
    templating = Templating(name, load_model_text(source))
    return ServedModel(source, name, templating, bundled=not settings.model)
