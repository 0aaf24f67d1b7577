"""Who may import whom: the contracts hold, they bite, and the engine's client stays light."""

import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("app", "admin", "db", "tangram", "kernels")
CLIENT_SIDE = {"tangram", "tangram.client", "tangram.errors", "tangram.geometry"}
CLIENT_SIDE |= {"tangram.config", "tangram.plan.cards", "tangram.plan.facts", "tangram.plan.sizing"}
CLIENT_SIDE |= {
    "tangram.calibration.settings",
    "tangram.calibration.verdict",
    "tangram.calibration.lookalikes",
    "tangram.host",
    "tangram.profile_summary",
    "tangram.shipped",
}


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def test_the_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("db.store", "app.services", False),
        ("db.store", "tangram.client", False),
        ("kernels.ops", "tangram.errors", False),
        ("tangram.plugin", "db.store", False),
        ("tangram.plugin", "kernels.ops", True),
        ("tangram.client", "kernels.ops", False),
        ("app.factory", "admin.mount", False),
        ("app.__main__", "admin.mount", True),
        ("app.services", "kernels.ops", False),
        ("admin.mount", "app.services", True),
    ],
)
def test_the_contracts_tell_right_from_wrong(
    tmp_path: Path, importer: str, imported: str, allowed: bool
) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    modules = ["db.store", "kernels.ops", "tangram.plugin", "tangram.client", "tangram.errors"]
    modules += ["tangram.geometry", "app.services", "app.factory", "app.__main__", "admin.mount"]
    for module in modules:
        path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(f"import {imported}\n" if module == importer else "")
    result = lint_imports(tmp_path)
    assert (result.returncode == 0) is allowed, result.stdout + result.stderr


def test_app_and_admin_use_only_the_light_part_of_tangram() -> None:
    graph = grimp.build_graph(*PACKAGES)
    for module in sorted(graph.modules):
        if module.split(".")[0] in ("app", "admin"):
            used = {
                name for name in graph.find_modules_directly_imported_by(module) if name.startswith("tangram")
            }
            assert used <= CLIENT_SIDE, module


@pytest.mark.parametrize("module", [*sorted(CLIENT_SIDE), "db.store"])
def test_importing_it_loads_no_engine(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
