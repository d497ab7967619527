"""Count how much of the use of ComfyUI's own templates falls to the families that have a workflow of this pack.

    python -m tools.workflows.template_use comfyui_workflow_templates_json-0.1.123-py3-none-any.whl \
        --results docs/results/families.md

The argument is the wheel of `comfyui-workflow-templates-json`, or a folder with its index.json. Counted are templates
that run locally (those that call a paid service are marked as not open source), by the `usage` that the index states.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .shipped import WORKFLOWS

HEADING = "## Share of use"
INDEX = "templates/index.json"
SHOWN = 0.003  # families without a workflow with less of the use are told together
# The index's names of models -> the family of a workflow. The first that a template names counts.
NAMES = {
    "MiniMax H3": "MiniMax H3",
    "Qwen Image 2.1": "Qwen-Image 2.1",
    "LTX-2.5": "LTX-2.5",
    "LTX-2.3": "LTX-2.3",
    "LTX-2": "LTX-2.3",
    "Z-Image-Turbo": "Z-Image Turbo",
    "Z-Image": "Z-Image Turbo",
    "Wan Animate": "Wan Animate 2",
    "Wan2.2": "Wan2.2",
    "Wan2.1": "Wan2.1",
    "Krea 2": "Krea 2",
    "FLUX 3 Image": "FLUX.3 Image",
    "FLUX.2 Klein": "Flux.2 Klein",
    "FLUX.2 Dev": "Flux.2",
    "FLUX.1": "Flux.1",
    "Qwen Image Edit 2511": "Qwen-Image-Edit",
    "Qwen-Image-Edit": "Qwen-Image-Edit",
    "Qwen-Image 2512": "Qwen-Image",
    "Qwen-Image": "Qwen-Image",
    "Hunyuan Video": "HunyuanVideo 1.5",
    "SD3.5": "Stable Diffusion 3.5",
    "Mochi": "Mochi",
}


@dataclass(frozen=True)
class Use:
    """What the index says: use and templates by family, those without a workflow by the index's name of the model."""

    use: Counter[str]
    templates: Counter[str]
    covered: frozenset[str]

    @property
    def share(self) -> float:
        """Of the use, what falls to families with a workflow."""
        return sum(self.use[family] for family in self.covered) / max(self.use.total(), 1)


def counted(index: list[dict[str, Any]]) -> Use:
    """Count the templates of an index."""
    use: Counter[str] = Counter()
    templates: Counter[str] = Counter()
    for template in (template for group in index for template in group["templates"]):
        if template.get("openSource", True) is False:
            continue
        models = template.get("models") or ["no model"]
        family = next((NAMES[name] for name in NAMES if name in models), models[0])
        use[family] += template.get("usage") or 0
        templates[family] += 1
    with_workflow = {workflow.family for workflow in WORKFLOWS}
    return Use(use, templates, frozenset(with_workflow & use.keys()))


def section(found: Use, source: str) -> str:
    """The section of the page."""
    rows = []
    small = 0
    for family, use in found.use.most_common():
        has = family in found.covered
        if not has and use < SHOWN * found.use.total():
            small += use
            continue
        rows.append(
            f"| {family} | {use / found.use.total():.1%} | {found.templates[family]} | {'yes' if has else 'no'} |"
        )
    rows.append(f"| all others | {small / found.use.total():.1%} | | no |")
    return "\n".join(
        [
            HEADING,
            "",
            f"Of the use of ComfyUI's local templates **{found.share:.1%}** falls to families with a workflow of this "
            f"pack ({found.templates.total()} templates, {found.use.total():,} uses, by the index of {source}). "
            "Counted by `python -m tools.workflows.template_use`; a family counts as a whole, its forms without a "
            "workflow too.",
            "",
            "| family | share of use | templates | workflow |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def read_index(path: Path) -> list[dict[str, Any]]:
    """The index in a wheel or a folder; SystemExit when there is none."""
    if path.is_dir():
        found = next(iter(sorted(path.rglob("index.json"))), None)
        text = None if found is None else found.read_text(encoding="utf-8")
    else:
        with zipfile.ZipFile(path) as wheel:
            name = next((name for name in wheel.namelist() if name.endswith(INDEX)), None)
            text = None if name is None else wheel.read(name).decode()
    if text is None:
        raise SystemExit(f"{path}: no index.json of ComfyUI's templates is there")
    index: list[dict[str, Any]] = json.loads(text)
    return index


def with_section(page: str, text: str) -> str:
    """`page` with its section of this kind replaced by `text`, or with `text` at its end."""
    before, _, after = page.partition(HEADING)
    following = re.search(r"^## ", after, re.MULTILINE)
    rest = after[following.start() :] if following else ""
    return f"{before.rstrip()}\n\n{text}{f'{chr(10)}{rest}' if rest else ''}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("templates", type=Path)
    parser.add_argument("--results", type=Path, help="write the section into this page")
    options = parser.parse_args()
    text = section(counted(read_index(options.templates)), options.templates.name.removesuffix("-py3-none-any.whl"))
    print(text)
    if options.results is not None:
        options.results.write_text(with_section(options.results.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
