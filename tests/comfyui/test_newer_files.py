"""What needs newer files of ComfyUI than its last whole release: see tools.comfyui.overlay."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.comfyui.server import ComfyServer, Prompt

from .installations import REPOSITORY, Installation, comfyui_python
from .prompts import REPORT, sage
from .test_families import sampling

pytestmark = pytest.mark.exhaustive

FILE, WIDE = "tiny_h3_newer.safetensors", "tiny_h3_wide_heads.safetensors"
COUNTED = "declared_calls.txt"  # of the support node
STEPS, BLOCKS = 4, 2
CALLS = STEPS * BLOCKS
H3 = [f"blocks.{block}.attn" for block in range(BLOCKS)]  # attention layers
_numbers = itertools.count(1)
INT8 = json.dumps({"attention": "comfy_kitchen_int8"})
LIST = json.dumps([{"attention": "comfy_kitchen_sol", "tau": 1.0}, {"attention": "comfy_kitchen_int8"}])


def write_tiny(server: ComfyServer, installation: Installation, file: str, family: str, *config: str) -> None:
    """The file of a family's tiny model; config: JSON of what differs from its usual shape."""
    command = [str(comfyui_python()), "-m", "tests.comfyui.tiny_families", str(installation.root)]
    command += [str(server.base / "models" / "diffusion_models" / file), family, *config]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)


@pytest.fixture(scope="module")
def newer(request: pytest.FixtureRequest, installation: Installation) -> ComfyServer:
    """A server whose ComfyUI lets files declare their attention, with a tiny MiniMax H3."""
    if not installation.is_overlay:
        pytest.skip("releases up to 0.33 know no attention that a file declares")
    server: ComfyServer = request.getfixturevalue("server")
    write_tiny(server, installation, FILE, "MiniMax H3")
    return server


@pytest.fixture(scope="module")
def wide_heads(newer: ComfyServer, installation: Installation) -> str:
    """The file of a tiny MiniMax H3 whose heads have more channels than the node takes."""
    write_tiny(
        newer, installation, WIDE, "MiniMax H3", json.dumps({"attention_head_dim": 288, "num_attention_heads": 1})
    )
    return WIDE


def h3(chain: Prompt) -> Prompt:
    """Four steps of MiniMax H3 without guidance, so that each step is one pass of two calls."""
    prompt = sampling("MiniMax H3", FILE, chain)
    prompt["sampler"]["inputs"] |= {"steps": STEPS, "cfg": 1.0}
    return prompt


def declared_calls(server: ComfyServer) -> int:
    return len((server.base / "output" / COUNTED).read_text(encoding="utf-8"))


def stored(config: str) -> torch.Tensor:
    """A configuration as files hold it."""
    return torch.tensor(list(config.encode()), dtype=torch.uint8)


def declaring(server: ComfyServer, way: str, config: str, file: str, number: int) -> Prompt:
    """What loads the model of `file` with layers that ask for `config`, by its own file or by a LoRA's."""
    models = server.base / "models"
    weights = load_file(models / "diffusion_models" / file)
    asked = {f"{layer}.comfy_attention.config": stored(config) for layer in H3}
    if way == "file":
        name = f"declares_{file}"
        save_file(weights | asked, models / "diffusion_models" / name)
        return {"loader": {"class_type": "TestDeclaringLoader", "inputs": {"unet_name": name, "number": number}}}
    name = f"declares_lora_{file}"
    (models / "loras").mkdir(exist_ok=True)
    changed = next(key for key, weight in weights.items() if key.startswith(H3[0]) and weight.ndim == 2)
    rows, columns = weights[changed].shape
    pair = {"lora_A": torch.full((2, columns), 1e-3), "lora_B": torch.full((rows, 2), 1e-3)}
    lora = {f"{changed.removesuffix('weight')}{part}.weight": weight for part, weight in pair.items()} | asked
    save_file({f"diffusion_model.{key}": weight for key, weight in lora.items()}, models / "loras" / name)
    inputs = {"model": ["loader", 0], "lora_name": name, "number": number}
    return {"declares": {"class_type": "TestDeclaringLora", "inputs": inputs}}


@pytest.mark.parametrize("config", [INT8, LIST], ids=["one", "list"])
@pytest.mark.parametrize("way", ["file", "LoRA"])
@pytest.mark.parametrize(
    ("why", "options", "declared", "code"),
    [
        ("nothing", {}, 0, ""),
        ("step range", {"start_percent": 0.5}, CALLS // 2, "SA-302"),
        ("head_dim", {}, CALLS, "SA-202"),
        ("guard", {}, CALLS, "SA-312"),
        ("off", {"mode": "off"}, CALLS, "SA-301"),
    ],
    ids=["nothing", "step range", "head_dim", "guard", "off"],
)
def test_who_computes_what_the_node_declines(
    newer: ComfyServer,
    wide_heads: str,
    way: str,
    config: str,
    why: str,
    options: dict[str, Any],
    declared: int,
    code: str,
) -> None:
    """Each reason to decline calls, with what a model's file and what a LoRA's file asks for."""
    number = next(_numbers)
    file = wide_heads if why == "head_dim" else FILE
    loads = declaring(newer, way, config, file, number)
    chain = {name: node for name, node in loads.items() if name != "loader"}
    chain |= sage(next(iter(chain), "loader"), **options)
    if why == "guard":
        inputs = {"model": ["sage", 0], "kind": "nan", "place": "every call of the backend", "number": number}
        chain["fault"] = {"class_type": "TestFault", "inputs": inputs}
    prompt = h3(chain)
    prompt["loader"]["inputs"]["unet_name"] = file
    logged = len(newer.log.read_text(errors="replace"))
    text = newer.run(prompt | loads).outputs[REPORT]["text"][0]
    assert declared_calls(newer) == declared, text
    label = "comfy_kitchen_int8" if config == INT8 else "comfy_kitchen_sol (tau 1.0), else comfy_kitchen_int8"
    assert f"The model's file asks for {label} in {BLOCKS} attention layers" in text, text
    assert (f"Left to {label}" in text) == (declared > 0 and why != "off"), text
    log = newer.log.read_text(errors="replace")[logged:]
    assert f"model's file asks for {label}" in log, log
    assert (f"{label} took {declared}" in log) == (declared > 0 and why != "off"), log
    assert (f"[{code}]" in text) if code else "[SA-3" not in text, text


def both(order: str, sparse: dict[str, Any]) -> Prompt:
    """The node under test and a node of another sparse attention, in one order or the other."""
    if order == "node first":
        return {**sage("loader"), "sparse": {**sparse, "inputs": {**sparse["inputs"], "model": ["sage", 0]}}}
    return {"sparse": {**sparse, "inputs": {**sparse["inputs"], "model": ["loader", 0]}}, **sage("sparse")}


@pytest.mark.parametrize("order", ["node first", "sparse first"])
def test_blocks_with_an_attention_of_their_own_are_named(newer: ComfyServer, order: str) -> None:
    """Dense steps are the node's in both orders; whose patch computed the others stands in the report."""
    sparse = {"class_type": "TestSparseBlocks", "inputs": {"start_percent": 0.5}}
    text = newer.run(h3(both(order, sparse))).outputs[REPORT]["text"][0]
    counts = re.search(
        r"(\d+) of \1 attention calls computed by SageAttention2 .*; "
        r"test_support took the place of blocks in (\d) of 4 passes, with (\d)",
        text,
    )
    assert counts is not None, text
    calls, passes, missing = map(int, counts.groups())
    assert 0 < calls < CALLS and calls + missing == CALLS and passes * BLOCKS == missing


@pytest.mark.parametrize("order", ["node first", "sparse first"])
@pytest.mark.parametrize(
    "method", [{"selection": "sol-attn", "selection.tau": 1.3}, {"selection": "vsa", "selection.keep_percent": 10.0}]
)
def test_dense_calls_of_model_sparse_attention_are_served(
    newer: ComfyServer, installation: Installation, order: str, method: dict[str, Any]
) -> None:
    """ComfyUI's own node. Its kernels need a GPU: here all is dense, by its override and by its block patches."""
    if not (installation.root / "comfy_extras" / "nodes_sparse_attention.py").is_file():
        pytest.skip("this overlay has no nodes_sparse_attention.py")
    options = {"start_percent": 0.2, "end_percent": 1.0, "dense_blocks": "", "min_tokens": 0, "extra_tokens": 0}
    inputs = {**method, **options, "sink_conditioning": "exact_kv", "verbose": True}
    sparse = {"class_type": "BlockSparseAttention", "inputs": inputs}
    text = newer.run(h3(both(order, sparse))).outputs[REPORT]["text"][0]
    assert f"{CALLS} of {CALLS} attention calls computed by SageAttention2" in text and "took the place" not in text, (
        text
    )
