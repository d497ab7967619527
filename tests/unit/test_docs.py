"""Promises of README.md and docs/: figures in one place, links, commands and paths that exist."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import comfy_sage2.__main__ as library_commands
import lab.__main__ as lab_commands
from lab.bench.page import page as bench_page
from lab.result_page import NAMED
from tools import charts, quotes

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = quotes.documents()
RESULTS = sorted((REPOSITORY / "docs" / "results").glob("*.md"))
HELP = sorted((REPOSITORY / "web" / "docs").glob("*.md"))
EVERY_PAGE = [*PAGES, *RESULTS, *HELP, REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "csrc" / "DESIGN.md"]

# A cell that is a figure and nothing else. In backticks it is a value to type, such as a default.
FIGURE = re.compile(r"\**[-−~<>≤≥]?\d[\d.,]*(?:e-?\d+)?\s?(?:%|ms|µs|s|dB|×|x|GiB|GB|MB|W|MHz|TFLOP/s|TOPS)?\**")
QUOTE = re.compile(r"<!-- quote .*?<!-- /quote -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
BRITISH = re.compile(
    r"quantis|normalis|synchronis|recognis|optimis|initialis|colour|behaviour|neighbour|\bcentre|\bgrey\b|towards", re.I
)


def name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def figures_without_source(page: str) -> list[str]:
    """The rows of tables outside of quotes in which a cell is a figure."""
    rows = [line for line in CODE.sub("", QUOTE.sub("", page)).splitlines() if line.startswith("|")]
    return [row for row in rows if any(FIGURE.fullmatch(cell.strip()) for cell in row.strip("|").split("|"))]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tables_of_figures_are_quotes(page: Path) -> None:
    assert figures_without_source(text(page)) == []


def test_a_figure_without_source_is_found() -> None:
    assert figures_without_source("| 8b | 12.5 ms |\n") == ["| 8b | 12.5 ms |"]
    assert figures_without_source("| 8b | **1.9** |\n") and figures_without_source("| a | 4.2e-7 |")
    assert figures_without_source("| `8b` | `0.999` | 525 or newer |\n") == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_quotes_are_as_in_the_results(page: Path) -> None:
    """`python -m tools.quotes` renews them."""
    assert quotes.renewed(text(page)) == text(page)


def test_quotes_of_a_table() -> None:
    table = quotes.table_below("# A\n\n| x | y | z |\n| --- | --- | --- |\n| a | 1 | 2 |\n| b | 3 | 4 |\n\n# B\n", "A")
    assert quotes.quoted(table, "") == "| x | y | z |\n| --- | --- | --- |\n| a | 1 | 2 |\n| b | 3 | 4 |\n"
    assert quotes.quoted(table, " | rows: b | columns: x; z") == "| x | z |\n| --- | --- |\n| b | 4 |\n"
    for options, word in ((" | rows: c", "row 'c'"), (" | columns: w", "column 'w'"), (" | cells: x", "cells")):
        with pytest.raises(ValueError, match=word):
            quotes.quoted(table, options)
    with pytest.raises(ValueError, match="heading 'C'"):
        quotes.table_below("# A\n", "C")
    with pytest.raises(ValueError, match="no table"):
        quotes.table_below("# A\n\n# B\n\n| x |\n", "A")
    with pytest.raises(ValueError, match=r"no-such\.md"):
        quotes.renewed("<!-- quote docs/results/no-such.md # A -->\n<!-- /quote -->")


@pytest.mark.parametrize("chart", charts.CHARTS, ids=lambda chart: chart.picture)
def test_charts_are_as_in_the_results(chart: charts.Chart) -> None:
    """`python -m tools.charts` draws them anew."""
    assert text(REPOSITORY / chart.picture) == charts.drawn(chart)


def test_chart_of_a_table() -> None:
    chart = charts.Chart("x.svg", "x.md", "A", "ms", "a < b", ours="mine", limit="none")
    drawn = charts.svg([["who", "ms"], ["theirs", "8.00"], ["**mine**", "2.00"]], chart)
    assert drawn.index("theirs") < drawn.index(">8.00<") < drawn.index(">mine<") < drawn.index(">2.00<")
    assert 'width="430"' in drawn and 'width="108"' in drawn and "a &lt; b" in drawn and drawn.count("bold") == 3
    with pytest.raises(ValueError, match="no column 'ms'"):
        charts.svg([["who", "s"], ["mine", "1"]], chart)


@pytest.mark.parametrize("row", ["`precise`", "`8b`", "`4b`", "`4b`, `rotate` off: the paper's"])
def test_the_readme_begins_with_figures_of_the_results(row: str) -> None:
    (bullet,) = re.findall(r"^- \*\*Close.*", text(REPOSITORY / "README.md"), re.MULTILINE)
    header, *rows = quotes.table_below(text(REPOSITORY / "docs" / "results" / "modes.md"), "Closeness and speed")
    (cells,) = [cells for cells in rows if cells[0] == row]
    assert f"{float(cells[header.index('videos: dB')]):.1f} dB" in bullet


def test_some_page_quotes_results() -> None:
    assert sum(len(QUOTE.findall(text(page))) for page in PAGES) >= 5


def faults_of_head(page: str) -> list[str]:
    """What is missing in the first lines of a page of results: before its first sentence, but for one that says that no
    command writes it; and parts that no command makes and that do not say so."""
    head = re.match(r"# .+\n\n(?:(?P<by_hand>.*no command writes this page.*)\n\n)?(?P<lines>(?:- .+\n)+)", page, re.I)
    if head is None:
        return ["no list below the title"]
    found = dict(re.findall(r"^- (\w+)[^:\n]*: (.+)$", head["lines"], re.MULTILINE))
    missing = [name for name in NAMED if name not in found]
    if head["by_hand"] is None and "`" not in found.get("Command", ""):
        missing.append("a command, or a first sentence that says that there is none")
    return missing + re.findall(r"command\b[^.:\n]*: none\b.*", page, re.IGNORECASE)


@pytest.mark.parametrize("page", [page for page in RESULTS if page.name != "README.md"], ids=name)
def test_results_name_what_they_are_of(page: Path) -> None:
    assert faults_of_head(text(page)) == []
    assert f"({page.name})" in text(page.parent / "README.md")


def test_a_page_that_does_not_say_what_it_is_of_is_found() -> None:
    lines = "- Machine: a GPU.\n- Kernels: 1.0.0.\n- Settings: `rotate` off.\n- Command: {}.\n\nText.\n"
    by_hand = "The state of today: no command writes this page any more.\n\n"
    assert faults_of_head(f"# A\n\n{lines.format('`make a`')}") == []
    assert faults_of_head(f"# A\n\n{by_hand}{lines.format('that of each row')}") == []
    assert faults_of_head(f"# A\n\nText.\n\n{lines.format('`make a`')}") == ["no list below the title"]
    assert faults_of_head(f"# A\n\n{lines.format('that of each row')}")[0].startswith("a command")
    assert faults_of_head("# A\n\n- Machine: a GPU.\n- Command: `make a`.\n") == ["Kernels", "Settings"]
    assert faults_of_head(f"# A\n\n{lines.format('`make a`')}\n## B\n\nCommand: none. Text.\n") == [
        "Command: none. Text."
    ]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", text(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name)
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text(page))):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def commands(page: str) -> list[tuple[str, str]]:
    """(module, the rest of the line) of every `python -m …` in code of a page."""
    return re.findall(r"(?:python|python\.exe|\$\(RUN\)) -m ([a-z_][\w.]*)([^`\n#]*)", page)


OTHERS = {"pip", "pytest", "torch.distributed.run", "cibuildwheel"}
SUBCOMMANDS = {"comfy_sage2": library_commands.COMMANDS, "lab": lab_commands.COMMANDS}


def source_of(module: str) -> str:
    """The text of a module's file, and for a package of all its modules."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    if spec.submodule_search_locations is None:
        assert spec.origin is not None
        return Path(spec.origin).read_text(encoding="utf-8")
    files = [file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name)
def test_commands_exist(page: Path) -> None:
    for module, rest in commands(text(page)):
        if module in OTHERS:
            continue
        words = rest.split()
        if module in SUBCOMMANDS and words and not words[0].startswith("-"):
            command = words[0].strip("`.,;:)…")
            if command:  # `python -m comfy_sage2 …` names no command
                assert command in SUBCOMMANDS[module], (module, rest)
                module = SUBCOMMANDS[module][command][0].rpartition(".")[0]
        source = source_of(module)
        for option in re.findall(r"(--[a-z][\w-]*)", rest):
            assert f'"{option}"' in source, (module, option)


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text(REPOSITORY / "Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^ {4}(?:\S+=\S+ )*)make ([a-z-]+)", text(page), re.MULTILINE))
    assert named <= targets


ROOTS = "comfy_sage2|lab|csrc|tools|tests|packages|requirements|web|wheels|workflows|locales|docs"


@pytest.mark.parametrize("page", [*PAGES, *RESULTS, *HELP, REPOSITORY / "lab/models/demo/README.md"], ids=name)
def test_paths_exist(page: Path) -> None:
    """Paths in backticks that begin with a folder of the repository."""
    named = set(re.findall(rf"`((?:{ROOTS})/[\w./-]*)`", text(page)))
    made = {"comfy_sage2/kernels/_unpacked/"}
    assert [path for path in named - made if not (REPOSITORY / path).exists()] == []


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name)
def test_code_imports_what_there_is(page: Path) -> None:
    """Of this project: what else an example needs may not be installed here."""
    for block in re.findall(r"^```python\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL):
        for module, names in re.findall(r"^from ((?:comfy_sage2|lab|tools)[\w.]*) import (.+)$", block, re.MULTILINE):
            there = importlib.import_module(module)
            for found in names.split(","):
                member = found.split()[0]
                if not hasattr(there, member):  # a module, else an error
                    importlib.import_module(f"{module}.{member}")


def test_no_torch_older_than_the_oldest_served_is_named() -> None:
    page = text(REPOSITORY / "docs" / "install.md")
    oldest = re.search(r"^\| torch \| (\d+)\.(\d+) or newer", page, re.MULTILINE)
    named = re.findall(r"\b(\d+)\.(\d+)\.\d+\b", " ".join(re.findall(r"torch (\d+\..*?) on ", page)))
    assert oldest is not None and len(named) >= 4
    served = tuple(map(int, oldest.groups()))
    assert min((int(major), int(minor)) for major, minor in named) >= served
    assert (REPOSITORY / "requirements" / f"torch-{oldest[1]}.{oldest[2]}.txt").is_file(), "it is tested"


def test_no_picture_is_left_over() -> None:
    everything = "\n".join(text(page) for page in EVERY_PAGE)
    pictures = [*(REPOSITORY / "docs" / "images").iterdir(), *(REPOSITORY / "web" / "docs" / "images").iterdir()]
    assert [picture.name for picture in pictures if picture.name not in everything] == []


@pytest.mark.parametrize("page", [*PAGES, *RESULTS, *HELP], ids=name)
def test_american_spelling(page: Path) -> None:
    """And ComfyUI's attention is not "the host's"."""
    assert BRITISH.findall(text(page)) == [] and "host's" not in text(page)


@pytest.mark.parametrize("folder", ["comfy_sage2", "lab", "tools", "tests", "web", "packages"])
def test_american_spelling_of_sources(folder: str) -> None:
    files = [path for kind in ("*.py", "*.js") for path in (REPOSITORY / folder).rglob(kind)]
    found = {path.name: BRITISH.findall(text(path)) for path in files if path != Path(__file__)}
    assert files and not any(found.values()), {name: words for name, words in found.items() if words}


def test_results_of_a_bench() -> None:
    """What `bench` writes becomes a page whose tables can be quoted."""
    shape = {"name": "d128-n1024"}
    common = {"shape": shape, "rounds": 9, "is_cpu_bound": False, "kernel_spread": 0.01, "call_spread": 0.02}
    speed = common | {"kernel_tflops": 790.4, "call_tflops": 457.2, "extra_memory": 0.512}
    peer = common | {"kernel_tflops": None, "call_tflops": 320.0, "extra_memory": 0.01}
    document = {
        "machine": {
            "gpu": "NVIDIA H200", "torch": "2.11.0", "cudnn": 91900, "python": "3.12.3", "system": "Linux x86_64",
            "driver": {"driver_version": "580.159.04", "power.limit": "700.00 W"},
            "kernels": {"sm90": {"wheel": "a.whl"}, "sm89": {"unavailable": "no GPU"}},
        },
        "settings": {"seed": 1, "heat_seconds": 30.0},
        "candidates": {
            "sm90 8b": {"version": "0.1.0", "note": ""}, "torch flash": {"version": "2.11.0", "note": ""},
        },
        "missing": {"sageattention": "not installed"},
        "accuracy": {"sm90 8b": {"gaussian": {"cosine": 0.9993, "relative_l1": 0.0378, "rmse": 1e-3}}},
        "speed": [speed | {"candidate": "sm90 8b"}, peer | {"candidate": "torch flash"}],
        "sustained": [],
        "accuracy_failures": {},
        "speed_failures": {},
        "kernel_times": "measured",
    }  # fmt: skip
    page = bench_page(document, "python -m lab bench", "2026-11-22")
    assert quotes.table_below(page, "Speed") == [
        ["shape", "8b kernel", "8b call", "FA-2 call"],
        ["d128-n1024", "790", "457", "320"],
    ]
    assert quotes.table_below(page, "Accuracy")[1] == ["8b", "0.999300", "0.0378"]
    assert quotes.table_below(page, "Memory")[1] == ["8b", "0.51 to 0.51"]
    assert "- sageattention: not installed" in page and "power limit 700.00 W" in page and "a.whl" in page
