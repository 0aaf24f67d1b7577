"""What the documents name exists: make targets, options, routes, variables, files."""

import argparse
import re
import subprocess
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from fastapi import APIRouter

import app.cli
import app.routes
from app.fairness import FairQueue, Limits
from app.metrics import Metrics
from app.remote_engine import RemoteEngine
from app.settings import Settings
from tangram.cli import build_parser
from tangram.config import TangramConfig
from tests.tree import PROJECT, ROOT, repository_files, texts

# Served by the engine's stock API server, so no route of ours declares them.
ENGINE_ROUTES = {"/v1/completions"}


def documents() -> list[Path]:
    """Every Markdown file of the repository."""
    return [path for path in repository_files() if path.suffix == ".md"]


def code_in(document: Path) -> list[str]:
    """The code blocks and code spans of a Markdown file."""
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return [*blocks, *spans]


def test_there_are_a_readme_and_a_changelog() -> None:
    assert {ROOT / "README.md", ROOT / "CHANGELOG.md"} <= set(documents())


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert PROJECT["version"] in headings


def test_documents_name_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for document in documents():
        for code in code_in(document):
            for named in re.findall(r"(?:^|\s)make ([a-z][a-z-]*)", code):
                assert named in targets, f"{document.name}: make {named}"


def test_every_make_target_is_in_the_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert targets == set(re.findall(r"^  make ([a-z-]+)", listed, flags=re.M))


def commands_of_tangram() -> dict[str, set[str]]:
    return commands_of(build_parser())


def commands_of(top: argparse.ArgumentParser) -> dict[str, set[str]]:
    """Options by command, such as "profile show"; a command of commands has those of all of them too."""
    found: dict[str, set[str]] = {}

    def visit(parser: argparse.ArgumentParser, name: str) -> set[str]:
        options: set[str] = set()
        for action in parser._actions:
            options.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                for part, below in action.choices.items():
                    options |= visit(below, f"{name} {part}".strip())
        found[name] = options
        return options

    visit(top, "")
    return found


def test_documents_name_commands_of_the_app_that_exist() -> None:
    commands = commands_of(app.cli.build_parser())
    assert "--keep" in commands["backup"]
    for document in documents():
        for code in code_in(document):
            # Not what follows the service of the same name in `docker compose exec`.
            code = re.sub(r"docker compose (?:exec|run|logs)\b.*? tangram-chat\b", "", code)
            for words in re.findall(r"\btangram-chat ([a-z]+(?: [a-z]+)?.*)", code):
                where = f"{document.name}: tangram-chat {words}"
                first, *rest = words.split("#")[0].split()
                command = f"{first} {rest[0]}" if first == "user" and rest and rest[0] != "..." else first
                assert command in commands, where
                for option in re.findall(r"(?<![\w-])(--[a-z-]+[a-z])", words):
                    assert option in commands[command], where


def test_every_command_of_the_app_and_its_options_are_in_operations() -> None:
    code = "\n".join(code_in(ROOT / "docs" / "operations.md"))
    for command, options in commands_of(app.cli.build_parser()).items():
        assert f"tangram-chat {command}".strip() in code, command
        for option in options - {"-h", "--help"}:
            assert option in code, f"{command} {option}"


def test_documents_name_options_that_exist() -> None:
    commands = commands_of_tangram()
    options = commands[""]
    assert "--tangram-retention" in options
    assert "--group-size" in commands["profile show"]
    for document in documents():
        for code in code_in(document):
            for named in re.findall(r"(?<![\w-])(--tangram-[a-z-]+[a-z])", code):
                assert named in options, f"{document.name}: {named}"
            # A command goes on over lines that end with a backslash.
            for line in code.replace("\\\n", " ").splitlines():
                for command, rest in re.findall(r"(?:^|[\s/])tangram ([a-z][\w|]*)(.*)", line):
                    assert command in commands, f"{document.name}: tangram {command}"
                    below = rest.split()[:1]
                    nested = f"{command} {below[0]}" if below else ""
                    known = commands.get(nested, commands[command])
                    if command != "serve":  # which takes all of vLLM's options too
                        for named in re.findall(r"(?<![\w-])(--[a-z-]+[a-z])", rest):
                            assert named in known, f"{document.name}: tangram {command} {named}"


def test_every_command_is_documented() -> None:
    code = "\n".join(code for document in documents() for code in code_in(document))
    for command in commands_of_tangram():
        assert f"tangram {command}".strip() in code, command


def test_calibration_lists_every_option() -> None:
    listed = {first.strip("`").split()[0] for first, *_ in table_under("Options", "calibration.md")}
    assert listed - {"option", "---"} == commands_of_tangram()["calibrate"] - {"-h", "--help"}


def declared_routes() -> set[str]:
    found = {"/", "/admin"} | ENGINE_ROUTES
    for module in iter_modules(app.routes.__path__, "app.routes."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, APIRouter):
                found.update(str(getattr(route, "path", "")) for route in value.routes)
    for path in (ROOT / "tangram").rglob("*.py"):
        found.update(re.findall(r"""["'](/tangram/[a-z/]+)["']""", path.read_text()))
    return {re.sub(r"\{\w+(:\w+)?\}", "{}", route) for route in found}


def test_documents_name_routes_that_exist() -> None:
    routes = declared_routes()
    assert "/health/ready" in routes
    # What looks like a route of ours: a path that begins with one of the routes' own first parts.
    first_parts = "|".join(sorted({re.escape(route.split("/")[1]) for route in routes if route != "/"}))
    path = re.compile(rf"(?<![\w./-])/(?:{first_parts})(?![\w-])(?:/[\w{{}}.-]+)*")
    for document in documents():
        for code in code_in(document):
            for named in path.findall(code):
                named = re.sub(r"\{\w*\}|\b[A-Z_]{2,}\b", "{}", named)
                family = named.removesuffix("...")  # "/api/..." stands for the routes that begin like that
                known = named in routes or (family != named and any(r.startswith(family) for r in routes))
                assert known, f"{document.name}: {named}"


def test_all_routes_of_the_engine_are_told() -> None:
    """In the README, which gives their number too, and in the tables of the API's own document."""
    source = (ROOT / "tangram" / "endpoints.py").read_text()
    routes = set(re.findall(r'\("(?:GET|POST)", "(/tangram/[a-z]+)"', source))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    number, told = re.findall(r"It adds (\w+) routes,(.*?) and the cache's", readme, re.DOTALL)[0]
    assert routes == set(re.findall(r"/tangram/[a-z]+", told))
    assert ["four", "five", "six", "seven", "eight"][len(routes) - 4] == number
    assert all(f" {route}`" in (ROOT / "docs" / "api.md").read_text(encoding="utf-8") for route in routes)


def test_documents_name_variables_that_are_read() -> None:
    source = "\n".join(text for path, text in texts(repository_files()) if path.suffix != ".md")
    prefixed = {f"TANGRAM_{name.upper()}" for name in names_of_settings()}
    for document in documents():
        for code in code_in(document):
            for named in re.findall(r"\bTANGRAM_[A-Z_]+\b", code):
                assert named in prefixed or named in source, f"{document.name}: {named}"


def names_of_settings() -> set[str]:
    return set(Settings.model_fields) | {field.name for field in fields(TangramConfig)}


def table_under(heading: str, document: str = "operations.md") -> list[list[str]]:
    """The rows, split into cells, of all tables in a section of a document."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*) \|$", section, flags=re.M)
    return [re.split(r" \| |\| ", row) for row in rows]


def test_operations_lists_every_setting_of_the_app_with_its_default() -> None:
    listed = {}
    for first, default, *_ in table_under("Settings"):
        names = re.findall(r"`([A-Z_]+)`", first)
        listed |= dict(zip(names, default.split(", ") if len(names) > 1 else [default], strict=False))
    fields_of_app = Settings.model_fields
    own = {"MODEL" if name == "model" else f"TANGRAM_{name.upper()}": name for name in fields_of_app}
    assert own.keys() - listed.keys() == {"TANGRAM_HOME"}, "that one has a section of its own"
    for variable, name in own.items():
        default = fields_of_app[name].default
        if variable in listed and default != "":
            shown = listed[variable]
            assert shown == (f"{default:g}" if isinstance(default, float) else str(default)), variable


def test_operations_lists_every_metric_of_the_app(tmp_path: Path) -> None:
    queue = FairQueue(running=1, waiting=1, limits=Limits(1, 1, 1))
    metrics = Metrics(RemoteEngine(Settings(home=tmp_path)), queue)
    made = {}
    for family in metrics.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        made[name] = family.type
    listed = {}
    for first, kind, *_ in table_under("Metrics"):
        if found := re.match(r"`(tangram_chat_\w+)", first):
            listed[found[1]] = kind
    assert listed == made


def test_documents_link_and_point_to_files_that_exist() -> None:
    for document in documents():
        text = document.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img[^>]*src="([^"]+)"', text):
            if not re.match(r"[a-z]+:|#", target):
                assert (document.parent / target.split("#")[0]).exists(), f"{document.name}: {target}"
        for code in code_in(document):
            for named in re.findall(r"(?<![\w./~$-])((?:scripts|docker|benchmarks|docs)/[\w./-]+\w)", code):
                assert (ROOT / named).exists(), f"{document.name}: {named}"


def anchors(document: Path) -> list[str]:
    """The anchors of a document's headings, as GitHub makes them, in order."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)", text, flags=re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_links_to_a_section_find_it() -> None:
    for document in documents():
        text = document.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", text):
            aimed = document.parent / target if target else document
            assert anchor in anchors(aimed), f"{document.name}: {target}#{anchor}"


def test_the_contents_of_operations_are_its_sections_in_order() -> None:
    document = ROOT / "docs" / "operations.md"
    contents = document.read_text(encoding="utf-8").split("\n## ")[0]
    assert re.findall(r"^- \[.*\]\(#(.*)\)$", contents, flags=re.M) == anchors(document)[1:]
