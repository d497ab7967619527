"""Promises of README.md and docs/: quoted figures, links, commands, paths and examples."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import comfy_sage2.__main__ as library_commands
import lab.__main__ as lab_commands
from tools import charts, quotes

REPOSITORY = quotes.REPOSITORY
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"python(?:\.exe)? -m ([a-z_][\w.]*)([^`\n#]*)")
FOREIGN_MODULES = {"pip", "pytest", "torch.distributed.run", "cibuildwheel"}
SUBCOMMANDS = {"comfy_sage2": library_commands.COMMANDS, "lab": lab_commands.COMMANDS}
ROOTS = "comfy_sage2|lab|csrc|tools|tests|packages|requirements|web|wheels|workflows|locales|docs"
GENERATED_PATHS = {"comfy_sage2/kernels/_unpacked/"}


@pytest.fixture(scope="module")
def pages(tracked: list[str]) -> dict[str, str]:
    """The text of every Markdown file that git tracks, by its path."""
    return {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in tracked if name.endswith(".md")}


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_resolve(pages: dict[str, str]) -> None:
    broken = []
    for name, page in pages.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page)):
            if target.startswith(("https://", "http://")):
                continue
            file, _, anchor = target.partition("#")
            path = (REPOSITORY / name).parent / file if file else REPOSITORY / name
            if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
                broken.append(f"{name}: {target}")
    assert broken == []


def test_quotes_are_as_in_the_results() -> None:
    """`python -m tools.quotes` renews them."""
    pages = {page: page.read_text(encoding="utf-8") for page in quotes.documents()}
    assert [page for page, text in pages.items() if quotes.renewed(text) != text] == []
    assert any("<!-- quote " in text for text in pages.values())


def test_the_chart_is_as_in_the_results() -> None:
    """`python -m tools.charts` redraws it."""
    assert charts.PICTURE.read_text(encoding="utf-8") == charts.drawn()


def test_the_index_of_the_results_names_each_page(pages: dict[str, str]) -> None:
    folder = "docs/results/"
    named = re.findall(r"^\| \[[\w-]+\.md\]\(([\w-]+\.md)\)", pages[f"{folder}README.md"], re.MULTILINE)
    assert sorted(named) == sorted(
        {name.removeprefix(folder) for name in pages if name.startswith(folder)} - {"README.md"}
    )


def commands(pages: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """(page, module, the rest of the line) of every `python -m …` in the pages."""
    for name, page in pages.items():
        if name != "CHANGELOG.md":
            yield from ((name, module, rest) for module, rest in COMMAND.findall(page))


def source_of(module: str) -> str:
    """The text of a module's file, and for a package of all its modules. Empty if there is no such module."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return ""
    files = [Path(spec.origin)]
    if spec.submodule_search_locations is not None:
        files = [file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_commands_exist(pages: dict[str, str]) -> None:
    wrong = []
    for name, module, rest in commands(pages):
        if module in FOREIGN_MODULES:
            continue
        command = rest.split()[0].strip("`.,;:)…") if rest.split() else ""
        if module in SUBCOMMANDS and command and not command.startswith("-"):
            if command not in SUBCOMMANDS[module]:
                wrong.append(f"{name}: {module} {command}")
                continue
            module = SUBCOMMANDS[module][command][0].rpartition(".")[0]
        source = source_of(module) + source_of("lab.arguments") * (module.partition(".")[0] == "lab")
        options = re.findall(r"(--[a-z][\w-]*)", rest)
        wrong += [f"{name}: {module} {option}" for option in options if f'"{option}"' not in source]
        if not source:
            wrong.append(f"{name}: {module}")
    assert wrong == []


def test_make_targets_and_paths_exist(pages: dict[str, str]) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    missing = []
    for name, page in pages.items():
        if name == "CHANGELOG.md":
            continue
        made = set(re.findall(r"(?:`|^ {4}(?:\S+=\S+ )*)make ([a-z-]+)", page, re.MULTILINE))
        missing += [f"{name}: make {target}" for target in made - targets]
        paths = set(re.findall(rf"`((?:{ROOTS})/[\w./-]*)`", page)) - GENERATED_PATHS
        missing += [f"{name}: {path}" for path in paths if not (REPOSITORY / path).exists()]
    assert missing == []


def test_the_files_of_the_numerics_exist(pages: dict[str, str]) -> None:
    files = set(re.findall(r"`(\w+\.py)`", pages["docs/dev/api.md"]))
    assert files and files <= {path.name for path in (REPOSITORY / "comfy_sage2/quantize").iterdir()}


def test_examples_import_existing_names(pages: dict[str, str]) -> None:
    """Only this project's modules: other packages of an example may not be installed here."""
    missing = []
    for name, page in pages.items():
        for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
            for module, members in re.findall(r"^from ((?:comfy_sage2|lab|tools)[\w.]*) import (.+)$", block, re.M):
                source = source_of(module)
                for member in (member.split()[0] for member in members.split(",")):
                    if not re.search(rf"\b{member}\b", source) and not source_of(f"{module}.{member}"):
                        missing.append(f"{name}: {module}.{member}")
    assert missing == []


def test_every_picture_is_used(pages: dict[str, str]) -> None:
    everything = "\n".join(pages.values())
    pictures = [*(REPOSITORY / "docs" / "images").iterdir(), *(REPOSITORY / "web" / "docs" / "images").iterdir()]
    assert [picture.name for picture in pictures if picture.name not in everything] == []


REASON_CODE = re.compile(r"SA-\d{3}")


def codes(*patterns: str) -> set[str]:
    """The codes that the files of these patterns name."""
    files = [file for pattern in patterns for file in REPOSITORY.glob(pattern)]
    return {code for file in files for code in REASON_CODE.findall(file.read_text(encoding="utf-8"))}


def rows() -> list[str]:
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| (SA-\d{3}) \|", text, re.MULTILINE)


def test_every_code_is_explained_once() -> None:
    used = codes("comfy_sage2/**/*.py", "*.py")
    assert len(used) > 40
    assert used - set(rows()) == set(), "codes without a row"
    assert set(rows()) - used == set(), "rows without a message"
    assert rows() == sorted(set(rows())), "each code once, in order"


def test_codes_on_other_pages_are_explained() -> None:
    named = codes("README.md", "docs/**/*.md", "web/**/*.md", "web/**/*.js", "locales/**/*.json", "workflows/**/*.json")
    assert named - set(rows()) == set()


CSRC = REPOSITORY / "csrc"


def test_experiments_that_the_code_cites_exist() -> None:
    known = set(re.findall(r"^\| (E\d{3}) \|", (CSRC / "EXPERIMENTS.md").read_text(encoding="utf-8"), re.MULTILINE))
    sources = [file for file in CSRC.rglob("*") if file.suffix in {".h", ".cuh", ".cu", ".cpp", ".md"}]
    cited = {number for file in sources for number in re.findall(r"\bE\d{3}\b", file.read_text(encoding="utf-8"))}
    assert cited and cited <= known
