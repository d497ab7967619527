"""Which models ask an attention node, by the sources of a ComfyUI."""

from __future__ import annotations

from pathlib import Path

import pytest
from comfyui.installations import Installation

from tools.comfyui.folders import OVERLAY
from tools.comfyui.who_asks import ASK, MODELS, who_asks, with_lists

PAGE = Path(__file__).resolve().parents[3] / "docs" / "other-packs.md"
ASKING = "out = optimized_attention(q, k, v, heads, mask, transformer_options=transformer_options)\n"
SILENT = "out = comfy.ops.scaled_dot_product_attention(q, k, v)\n"


def comfyui(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / MODELS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_a_model_asks_where_its_code_gives_the_options(tmp_path: Path) -> None:
    handing_on = "def attend(q, **kwargs):\n    return optimized_attention(q, **kwargs)\n"
    texts = {
        "krea2/model.py": ASKING,
        "ernie/model.py": "out = optimized_attention(q, k, v, heads)\n",
        "wan/model.py": SILENT + ASKING,
        "wan/model_animate.py": SILENT,
        "wan/vae.py": SILENT,
        "seedvr/attention.py": "kwargs = {}\nout = optimized_attention(q, k, v, **kwargs)\n",
        "trellis2/model.py": f"{handing_on}attend(q, transformer_options=options)\n",
        "minimax_music/dit.py": "attention = optimized_attention_for_device(q.device)\nout = attention(q, k, v)\n",
        "lens/model.py": "x = 1\n",
    }
    asks, never = who_asks(comfyui(tmp_path, **texts))
    assert asks == ["Krea 2", "TRELLIS.2", "Wan 2.1 and 2.2"]
    assert never == ["ERNIE-Image", "MiniMax Music", "SeedVR2", "the face adapter of Wan Animate 1"]


def test_a_new_model_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no name in NAMES: another/model\.py$"):
        who_asks(comfyui(tmp_path, **{"another/model.py": ASKING}))


def test_lists_take_the_place_of_the_earlier_ones() -> None:
    page = f"# Page\n\n- In ComfyUI: old.\n\n{ASK}\n\nOld.\n\nkept\n"
    made = with_lists(page, ["A", "B"], ["C"])
    assert "- In ComfyUI: C; text encoders" in made and f"{ASK}\n\nA, B.\n\nkept\n" in made
    assert with_lists(made, ["A", "B"], ["C"]) == made


@pytest.mark.parametrize("name", ["ComfyUI", OVERLAY])
def test_the_page_says_what_the_sources_say(name: str) -> None:
    """The page follows from the newest files that can be had; a release may lack some of their models."""
    found = Installation(Path.home() / name)
    if (found.reason_missing is not None and "no ComfyUI" in found.reason_missing) or not found.is_newest:
        pytest.skip(f"no newest ComfyUI at {found.root}")
    asks, never = who_asks(found.root)
    page = PAGE.read_text(encoding="utf-8")
    assert all(f" {model}" in page.replace("\n", " ") for model in (*asks, *never))
    if found.is_overlay:
        assert with_lists(page, asks, never) == page, "run python -m tools.comfyui.who_asks"
