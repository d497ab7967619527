"""How much of the use of ComfyUI's templates has a workflow of ours."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools.workflows.shipped import WORKFLOWS
from tools.workflows.template_use import HEADING, INDEX, NAMES, counted, read_index, section, with_section

PAGE = Path(__file__).resolve().parents[3] / "docs" / "results" / "families.md"


def template(use: int | None, *models: str, **more: Any) -> dict[str, Any]:
    return {"name": "one", "models": list(models), "usage": use, **more}


INDEX_OF_TWO_GROUPS = [
    {"templates": [template(60, "LTX-2.3", "Lightricks"), template(900, "Paid", openSource=False)]},
    {
        "templates": [
            template(20, "FLUX", "FLUX.2 Klein"),
            template(20, "Unknown"),
            template(None, "Anima"),
            template(0),
        ]
    },
]


def test_local_templates_count_by_their_use() -> None:
    found = counted(INDEX_OF_TWO_GROUPS)
    assert found.use == {"LTX-2.3": 60, "Flux.2 Klein": 20, "Unknown": 20, "Anima": 0, "no model": 0}
    assert found.covered == {"LTX-2.3", "Flux.2 Klein"} and found.share == 0.8
    text = section(found, "an index")
    assert "**80.0%**" in text and "| Unknown | 20.0% | 1 | no |" in text and "| LTX-2.3 | 60.0% | 1 | yes |" in text


def test_names_lead_to_families_of_workflows() -> None:
    families = {workflow.family for workflow in WORKFLOWS}
    assert set(NAMES.values()) <= families


def test_the_index_is_read_from_a_wheel_and_a_folder(tmp_path: Path) -> None:
    wheel = tmp_path / "templates.whl"
    with zipfile.ZipFile(wheel, "w") as written:
        written.writestr(f"package/{INDEX}", json.dumps(INDEX_OF_TWO_GROUPS))
    folder = tmp_path / "folder"
    (folder / "templates").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"no index\.json"):
        read_index(folder)
    (folder / INDEX).write_text(json.dumps(INDEX_OF_TWO_GROUPS), encoding="utf-8")
    assert read_index(wheel) == read_index(folder) == INDEX_OF_TWO_GROUPS


def test_a_section_takes_the_place_of_the_earlier_one() -> None:
    page = with_section("# Page\n\ntext\n", f"{HEADING}\n\nfirst\n")
    assert page == f"# Page\n\ntext\n\n{HEADING}\n\nfirst\n"
    page = with_section(f"{page}\n## Next\n\nkept\n", f"{HEADING}\n\nsecond\n")
    assert page == f"# Page\n\ntext\n\n{HEADING}\n\nsecond\n\n## Next\n\nkept\n"


def test_nine_tenths_of_the_use_have_a_workflow() -> None:
    found = re.search(r"templates \*\*([\d.]+)%\*\*", PAGE.read_text(encoding="utf-8"))
    assert found is not None and float(found[1]) >= 90.0
