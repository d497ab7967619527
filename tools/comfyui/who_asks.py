"""Which of ComfyUI's models ask an attention node, read from the sources of a ComfyUI.

    python -m tools.comfyui.who_asks ~/ComfyUI-overlay [--write docs/other-packs.md]

An attention function of ComfyUI asks the node only where the model's code gives it `transformer_options`. A file that
calls attention with them somewhere asks; one that calls it without them alone, by ComfyUI's functions or torch's, never
does. Files without a name in `NAMES` end the command: a new model has to be named or left out here.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from .folders import comfyui_folder

MODELS = "comfy/ldm"
ASK, NEVER = "The node can compute the attention of these models:", "- In ComfyUI: "
# By the file below comfy/ldm; "" is no diffusion model (a VAE, a detector, what others share).
NAMES = {
    "ace/ace_step15.py": "ACE-Step 1.5",
    "ace/attention.py": "ACE-Step 1",
    "anima/model.py": "Anima's adapter",
    "audio/dit.py": "Stable Audio",
    "aura/mmdit.py": "AuraFlow",
    "boogu/model.py": "Boogu",
    "cascade/common.py": "Stable Cascade",
    "cogvideo/model.py": "CogVideoX",
    "cosmos/blocks.py": "Cosmos 1",
    "cosmos/predict2.py": "Cosmos-Predict2, Anima",
    "ernie/model.py": "ERNIE-Image",
    "flux/math.py": "Flux.1, Flux.2, Chroma",
    "genmo/joint_model/asymm_models_joint.py": "Mochi",
    "genmo/joint_model/utils.py": "",
    "hidream/model.py": "HiDream-I1",
    "hidream_o1/attention.py": "HiDream-O1",
    "hunyuan3dv2_1/hunyuandit.py": "Hunyuan3D 2.1",
    "hunyuan_video/model.py": "HunyuanVideo, HunyuanImage",
    "hydit/attn_layers.py": "HunyuanDiT",
    "hydit/poolers.py": "",
    "ideogram4/model.py": "Ideogram 4",
    "joyimage/model.py": "JoyImage",
    "kandinsky5/model.py": "Kandinsky 5",
    "krea2/model.py": "Krea 2",
    "lens/model.py": "Lens",
    "lightricks/duration_head.py": "",
    "lightricks/model.py": "LTX-Video, LTX-2",
    "lumina/model.py": "Z-Image, Lumina 2",
    "minimax/model.py": "MiniMax H3",
    "minimax_music/ar.py": "MiniMax Music",
    "minimax_music/dit.py": "MiniMax Music",
    "modules/attention.py": "Stable Diffusion 1 and 2, SDXL",
    "modules/diffusionmodules/mmdit.py": "Stable Diffusion 3.5",
    "modules/diffusionmodules/model.py": "",
    "omnigen/omnigen2.py": "OmniGen2",
    "pixart/blocks.py": "PixArt",
    "pixeldit/model.py": "PixelDiT",
    "pixeldit/modules.py": "PixelDiT",
    "qwen_image/model.py": "Qwen-Image, Mage-Flow",
    "qwen_image21/model.py": "Qwen-Image 2.1",
    "seedvr/attention.py": "SeedVR2",
    "supir/supir_modules.py": "SUPIR",
    "trellis2/model.py": "TRELLIS.2",
    "triposplat/model.py": "TripoSplat",
    "wan/ar_model.py": "Wan 2.1 and 2.2",
    "wan/model.py": "Wan 2.1 and 2.2",
    "wan/model_animate.py": "the face adapter of Wan Animate 1",
    "wan/model_animate2.py": "Wan Animate 2",
    "wan/model_multitalk.py": "MultiTalk's audio attention",
    "wan/model_wandancer.py": "WanDancer's music",
}
NO_DIFFUSION = re.compile(r"vae|^(rt_detr|sam3|moge|depth_anything_3|cosmos/cosmos_tokenizer)/")
_FUNCTIONS = re.compile(r"optimized_attention|scaled_dot_product_attention|attention_(pytorch|basic|sub_quad|split)$")


def who_asks(root: Path) -> tuple[list[str], list[str]]:
    """The names of the models that ask, and of those that never do; SystemExit names files that have no name here."""
    asks: dict[str, bool] = {}
    unknown = []
    for path in sorted((root / MODELS).rglob("*.py")):
        name = path.relative_to(root / MODELS).as_posix()
        calls = list(_calls(ast.parse(path.read_text(encoding="utf-8"))))
        if not calls or NO_DIFFUSION.search(name):
            continue
        if name not in NAMES:
            unknown.append(name)
        elif NAMES[name]:
            asks[NAMES[name]] = asks.get(NAMES[name], False) or any(calls)
    if unknown:
        raise SystemExit(f"these files call attention and have no name in NAMES: {', '.join(unknown)}")
    return sorted(n for n, found in asks.items() if found), sorted(n for n, found in asks.items() if not found)


def _calls(tree: ast.AST) -> Iterable[bool]:
    """Of each call of an attention function whether it has `transformer_options`.

    A function of the file may hand on the keywords that it is given: then its own callers count. A file that asks
    ComfyUI for one of its functions calls that one without.
    """
    handing_on: set[str] = set()
    handed: set[ast.Call] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.args.kwarg is not None:
            calls = [call for call in _named_calls(function) if function.args.kwarg.arg in _unpacked(call)]
            handed.update(calls)
            handing_on |= {function.name for _ in calls[:1]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node) in handing_on:
            yield _has_options(node)
    yield from (_has_options(call) for call in _named_calls(tree) if call not in handed)


def _named_calls(tree: ast.AST) -> list[ast.Call]:
    """The calls of attention functions."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _FUNCTIONS.match(_name(node))]


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "id", None) or getattr(call.func, "attr", ""))


def _unpacked(call: ast.Call) -> set[str]:
    """The names of the mappings that are unpacked into keywords."""
    return {getattr(keyword.value, "id", "") for keyword in call.keywords if keyword.arg is None}


def _has_options(call: ast.Call) -> bool:
    return any(keyword.arg == "transformer_options" for keyword in call.keywords)


def with_lists(page: str, asks: list[str], never: list[str]) -> str:
    """`page` with its two lists replaced."""
    before, _, after = page.partition(f"{ASK}\n\n")
    following = after.partition("\n\n")[2]
    page = f"{before}{ASK}\n\n{', '.join(asks)}.\n{f'{chr(10)}{following}' if following else ''}"
    others = "text encoders, and HiDream-O1 in the part of its attention that goes to the text"
    line = f"{NEVER}{', '.join(never)}; {others}."
    return re.sub(rf"^{re.escape(NEVER)}.*$", line, page, flags=re.MULTILINE)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comfyui", type=comfyui_folder)
    parser.add_argument("--write", type=Path, help="write the lists into this page")
    options = parser.parse_args()
    asks, never = who_asks(options.comfyui)
    print(f"ask: {', '.join(asks)}\nnever ask: {', '.join(never)}")
    if options.write is not None:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(with_lists(page, asks, never), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
