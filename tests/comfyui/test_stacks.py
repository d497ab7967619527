"""The node and the drop-in among other people's packs and ComfyUI's own patches; what happened goes into a page.

The packs are clones in the folder that COMFY_SAGE2_PACKS names. Their Python packages have to be in ComfyUI's Python:
`python -m tools.comfyui.environment --packs FOLDER …` puts them there.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_sage2.drop_in import offer
from lab.demo.tiny_wan import dit_shapes, write_checkpoint
from tools.comfyui.server import ComfyServer, Prompt, Run
from tools.stacks import record

from . import packs
from .installations import REPOSITORY, Installation, comfyui_python, installations
from .prompts import LATENT, REPORT, sage, sampling, with_report

Chain = dict[str, dict[str, Any]]

NEWEST = [found for found in installations() if found.is_newest or found.reason_missing is not None][:1]
# One for each pack: what has to be among the nodes once it is loaded.
NODE_OF = {
    packs.KJNODES: "PathchSageAttentionKJ",
    packs.BLEH: "BlehSageAttentionSampler",
    packs.GGUF: "UnetLoaderGGUF",
    packs.WAN_WRAPPER: "WanVideoSampler",
}
STEPS = 4
_seeds = itertools.count(1000)
TIMES = re.compile(r", [\d.]+ s\b")


def need(pack: str) -> None:
    reason = packs.reason_missing(pack)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module", params=NEWEST, ids=lambda found: found.name)
def newest(request: pytest.FixtureRequest) -> Installation:
    found: Installation = request.param
    if found.reason_missing is not None:
        pytest.skip(found.reason_missing)
    return found


@pytest.fixture(scope="module")
def host(newest: Installation, start: Callable[..., ComfyServer], patient_threads: None) -> Iterator[ComfyServer]:
    """The newest ComfyUI with every pack that is there, and the pack's setting on.

    Its attention is the one that it takes on a GPU: the one for a CPU asks for the free memory in every call, which a
    compiler traces for minutes.
    """
    server = start(newest.root, REPOSITORY, "--use-pytorch-cross-attention")
    there = [pack for pack in packs.PACKS if packs.reason_missing(pack) is None]
    for pack in there:
        (server.base / "custom_nodes" / pack).symlink_to(packs.clone(pack), target_is_directory=True)
    settings = server.base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"comfy_sage2.sageattention": True}), encoding="utf-8")
    models = server.base / "models" / "diffusion_models"
    if packs.GGUF in there:
        write_gguf(models / "tiny_wan.safetensors", models / "tiny_wan.gguf")
    if packs.WAN_WRAPPER in there:
        # The wrapper takes every model that is not the 14B for one of 30 layers with 12 heads.
        write_checkpoint(models / "wrapped_wan.safetensors", dit_shapes(dim=384, ffn_dim=64, layers=30), seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(offer.BACKEND_VARIABLE, offer.REFERENCE)
        with server:
            nodes = server.get("/object_info")
            for pack in there:
                assert NODE_OF[pack] in nodes, (
                    f"{pack} was not loaded; `python -m tools.comfyui.environment --packs {packs.folder()} …` installs "
                    f"what it needs\n{server.tail()}"
                )
            yield server


def write_gguf(source: Path, target: Path) -> None:
    script = Path(__file__).with_name("gguf_file.py")
    subprocess.run([comfyui_python(), script, source, target], check=True, capture_output=True)


def hosts(newest: Installation, pack: str) -> str:
    """What a stack ran in: ComfyUI and the other pack, with their versions."""
    return f"{newest.name}, {packs.named(pack)}"


def node(kind: str, model: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": {"model": [model, 0], **inputs}}


def half(model: str) -> dict[str, Any]:
    """bfloat16, as on a GPU: packs cast what is in float32."""
    return node("ModelComputeDtype", model, dtype="bf16")


def ours(model: str, **options: Any) -> dict[str, Any]:
    """The node with what a new node has where it decides the numbers, as the drop-in has it."""
    return sage(model, rotate=True, **options)


def kj(model: str, kind: str = "auto") -> dict[str, Any]:
    return node("PathchSageAttentionKJ", model, sage_attention=kind, allow_compile=False)


def latents(server: ComfyServer, prompt: Prompt) -> torch.Tensor:
    """Of a prompt, sampled once for all tests."""
    return _sampled(server, json.dumps(prompt))


@cache
def _sampled(server: ComfyServer, prompt: str) -> torch.Tensor:
    return server.latent(server.run(json.loads(prompt)), LATENT)


def wan(chain: Chain) -> Prompt:
    return sampling("wan", chain, steps=STEPS)


def counts(run: Run) -> list[str]:
    """The report's lines that count calls or name another attention, without times and what the process did before."""
    words = ("call", "served", "replaced", "another", "left to")
    text = run.outputs[REPORT]["text"][0].partition("Calls of sageattention")[0]
    found = [line.strip() for line in text.splitlines() if any(word in line.lower() for word in words)]
    return [TIMES.sub("", line) for line in found if line != "Served by" and "Time" not in line]


def compared(found: torch.Tensor, wanted: torch.Tensor, plain: torch.Tensor) -> str:
    """In words how `found` lies to what the node gives and to full precision."""
    if torch.equal(found, wanted):
        return "bit-identical to the node's"
    distance = float((found - wanted).norm() / (wanted - plain).norm())
    return f"as near to the node's as {distance:.2g} of the node's distance to full precision"


def close(found: torch.Tensor, plain: torch.Tensor, least: float = 0.999) -> bool:
    """Whether the cosine similarity is above `least`, where mode 8b leaves it with these models."""
    found, plain = found.flatten(), plain.flatten()
    cosine = float(torch.nn.functional.cosine_similarity(found, plain, dim=0))
    print(f"cosine similarity {cosine:.6f}")
    return cosine > least


def run_of(host: ComfyServer, chain: Chain) -> tuple[Run, torch.Tensor]:
    run = host.run(with_report(wan(chain)))
    return run, host.latent(run, LATENT)


def calls_of_others(host: ComfyServer) -> int:
    """How many calls the drop-in has served in mode 8b, as a report says that is made now."""
    prompt = with_report(sampling("wan", steps=1, seed=next(_seeds)))
    text = host.run(prompt).outputs[REPORT]["text"][0]
    found = re.search(r"^Calls of sageattention since the start: .*?(\d+) by reference, 8b", text, re.MULTILINE)
    return int(found[1]) if found else 0


def test_kjnodes_alone(host: ComfyServer, newest: Installation) -> None:
    need(packs.KJNODES)
    plain = latents(host, wan({"half": half("loader")}))
    for kind, mode in {
        "auto": "8b",
        "sageattn_qk_int8_pv_fp8_cuda": "8b",
        "sageattn_qk_int8_pv_fp8_cuda++": "8b",
        "sageattn_qk_int8_pv_fp16_cuda": "precise",
        "sageattn_qk_int8_pv_fp16_triton": "precise",
    }.items():
        wanted = latents(host, wan({"half": half("loader"), "sage": ours("half", mode=mode)}))
        found = latents(host, wan({"half": half("loader"), "kj": kj("half", kind)}))
        assert not torch.equal(wanted, plain) and torch.equal(found, wanted), kind
        stack = f"KJNodes' *Patch Sage Attention*, {kind}"
        record(
            stack,
            hosts(newest, packs.KJNODES),
            compared(found, wanted, plain),
            [f"served in mode {mode} by the drop-in"],
        )


def test_kjnodes_behind_the_node(host: ComfyServer, newest: Installation) -> None:
    """It replaces the node, and the report must not claim its calls."""
    need(packs.KJNODES)
    run, found = run_of(host, {"half": half("loader"), "sage": ours("half", mode="4b"), "kj": kj("sage")})
    wanted = latents(host, wan({"half": half("loader"), "sage": ours("half")}))
    assert torch.equal(found, wanted)
    said = "\n".join(counts(run))
    assert "0 of 16 attention calls served" in said and "Left to ComfyUI-KJNodes" in said, said
    plain = latents(host, wan({"half": half("loader")}))
    record("the node in 4b, then KJNodes'", hosts(newest, packs.KJNODES), compared(found, wanted, plain), counts(run))


def test_kjnodes_before_the_node(host: ComfyServer, newest: Installation) -> None:
    need(packs.KJNODES)
    run, found = run_of(host, {"half": half("loader"), "kj": kj("half"), "sage": ours("kj", mode="4b")})
    wanted = latents(host, wan({"half": half("loader"), "sage": ours("half", mode="4b")}))
    assert torch.equal(found, wanted)
    assert "(100%)" in run.outputs[REPORT]["text"][0]
    plain = latents(host, wan({"half": half("loader")}))
    record("KJNodes', then the node in 4b", hosts(newest, packs.KJNODES), compared(found, wanted, plain), counts(run))


def test_gguf(host: ComfyServer, newest: Installation) -> None:
    need(packs.GGUF)

    def gguf(chain: Chain) -> Prompt:
        prompt = wan(chain)
        prompt["loader"] = {"class_type": "UnetLoaderGGUF", "inputs": {"unet_name": "tiny_wan.gguf"}}
        return prompt

    plain = latents(host, gguf({}))
    run = host.run(with_report(gguf({"sage": ours("loader")})))
    found = host.latent(run, LATENT)
    assert not torch.equal(found, plain) and close(found, plain)
    assert "(100%)" in run.outputs[REPORT]["text"][0]
    record(
        "GGUF loader (Q8_0), then the node",
        hosts(newest, packs.GGUF),
        "close to full precision of the same file",
        counts(run),
    )


def custom(chain: Chain, *, end_percent: float | None) -> Prompt:
    """A sampling by SamplerCustom, with bleh's sampler until `end_percent`."""
    prompt = wan(chain)
    old = prompt.pop("sampler")["inputs"]
    prompt["euler"] = {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}}
    sampler = "euler"
    if end_percent is not None:
        inputs = {"sampler": ["euler", 0], "start_percent": 0.0, "end_percent": end_percent, "yaml_parameters": ""}
        prompt["bleh"] = {"class_type": "BlehSageAttentionSampler", "inputs": inputs}
        sampler = "bleh"
    inputs = {"model": ["shift", 0], "scheduler": "simple", "steps": STEPS, "denoise": 1.0}
    prompt["sigmas"] = {"class_type": "BasicScheduler", "inputs": inputs}
    inputs = {
        "model": ["shift", 0], "add_noise": True, "noise_seed": 42, "cfg": old["cfg"], "positive": old["positive"],
        "negative": old["negative"], "sampler": [sampler, 0], "sigmas": ["sigmas", 0],
        "latent_image": old["latent_image"],
    }  # fmt: skip
    prompt["sampler"] = {"class_type": "SamplerCustom", "inputs": inputs}
    return prompt


def test_bleh_alone(host: ComfyServer, newest: Installation) -> None:
    """It leaves cross-attention alone, since it takes the drop-in for sageattention 1.x."""
    need(packs.BLEH)
    plain = latents(host, custom({}, end_percent=None))
    wanted = latents(host, custom({"sage": ours("loader", apply_to="self only")}, end_percent=None))
    found = latents(host, custom({}, end_percent=1.0))
    assert not torch.equal(found, plain) and torch.equal(found, wanted)
    record(
        "bleh's sampler",
        hosts(newest, packs.BLEH),
        compared(found, wanted, plain),
        ["self-attention served by the drop-in"],
    )


def test_bleh_for_half_of_the_steps(host: ComfyServer, newest: Installation) -> None:
    need(packs.BLEH)
    run = host.run(with_report(custom({"sage": ours("loader")}, end_percent=0.5)))
    found = host.latent(run, LATENT)
    plain = latents(host, custom({}, end_percent=None))
    assert close(found, plain)
    said = "\n".join(counts(run))  # half of the noise lies in three of the four steps
    assert "4 of 16 attention calls served" in said and "Left to ComfyUI-bleh" in said, said
    record(
        "the node, bleh's sampler for half of the steps",
        hosts(newest, packs.BLEH),
        "close to full precision",
        counts(run),
    )


def test_wan_video_wrapper(host: ComfyServer, newest: Installation) -> None:
    need(packs.WAN_WRAPPER)

    def prompt(attention: str) -> Prompt:
        loader = {
            "model": "wrapped_wan.safetensors", "base_precision": "bf16", "quantization": "disabled",
            "load_device": "main_device", "attention_mode": attention,
        }  # fmt: skip
        sampler = {
            "model": ["cpu", 0], "text_embeds": ["text", 0], "image_embeds": ["empty", 0], "steps": 2, "cfg": 1.0,
            "shift": 5.0, "seed": 42, "force_offload": False, "scheduler": "euler", "riflex_freq_index": 0,
        }  # fmt: skip
        written = {"samples": ["sampler", 0], "filename_prefix": "test/latent"}
        parts = {name: entry for name, entry in wan({}).items() if name in ("positive", "negative")}
        return {
            **parts,
            "loader": {"class_type": "WanVideoModelLoader", "inputs": loader},
            "cpu": node("TestWanWrapperOnCpu", "loader"),
            "text": {
                "class_type": "WanVideoTextEmbedBridge",
                "inputs": {"positive": ["positive", 0], "negative": ["negative", 0]},
            },
            "empty": {"class_type": "WanVideoEmptyEmbeds", "inputs": {"width": 128, "height": 128, "num_frames": 9}},
            "sampler": {"class_type": "WanVideoSampler", "inputs": sampler},
            LATENT: {"class_type": "SaveLatent", "inputs": written},
        }

    before = calls_of_others(host)
    plain, found = latents(host, prompt("sdpa")), latents(host, prompt("sageattn"))
    served = calls_of_others(host) - before
    assert not torch.equal(found, plain) and close(found, plain)
    assert served == 30 * 2  # its layers and steps; cross-attention is torch's there
    said = [f"{served} calls of self-attention served by the drop-in"]
    record("WanVideoWrapper, sageattn", hosts(newest, packs.WAN_WRAPPER), "close to its sdpa", said)


def test_easycache(host: ComfyServer, newest: Installation) -> None:
    cached = node("EasyCache", "loader", reuse_threshold=3.0, start_percent=0.0, end_percent=1.0, verbose=False)
    run, found = run_of(
        host, {"sage": ours("loader"), "cache": {**cached, "inputs": {**cached["inputs"], "model": ["sage", 0]}}}
    )
    plain = latents(host, wan({"cache": cached}))
    assert not torch.equal(found, plain) and close(found, plain)
    record("the node, then EasyCache", newest.name, "close to full precision with EasyCache", counts(run))


def test_context_windows(host: ComfyServer, newest: Installation) -> None:
    inputs = {
        "context_length": 5, "context_overlap": 0, "context_schedule": "standard_static", "context_stride": 1,
        "closed_loop": False, "fuse_method": "pyramid", "freenoise": False, "retain_first_frame": False,
        "split_conds_to_windows": False,
    }  # fmt: skip
    plain = latents(host, wan({"windows": node("WanContextWindowsManual", "loader", **inputs)}))
    run, found = run_of(host, {"sage": ours("loader"), "windows": node("WanContextWindowsManual", "sage", **inputs)})
    assert not torch.equal(found, plain) and close(found, plain)
    assert "(100%)" in run.outputs[REPORT]["text"][0]
    record("the node, then context windows", newest.name, "close to full precision with them", counts(run))


@pytest.mark.parametrize("order", ["before", "behind"])
def test_torch_compile(host: ComfyServer, newest: Installation, order: str) -> None:
    eager = latents(host, wan({"sage": ours("loader")}))
    first, second = ("loader", "sage") if order == "before" else ("compiled", "loader")
    entries = {
        "sage": ours(first),
        "compiled": node("TorchCompileModel", second, backend="cudagraphs"),
    }
    chain = {name: entries[name] for name in (("sage", "compiled") if order == "before" else ("compiled", "sage"))}
    run, found = run_of(host, chain)
    plain = latents(host, wan({}))
    assert (found - eager).norm() < 0.1 * (eager - plain).norm()
    assert "(100%)" in run.outputs[REPORT]["text"][0]
    stack = "the node, then TorchCompileModel" if order == "before" else "TorchCompileModel, then the node"
    record(stack, newest.name, compared(found, eager, plain), counts(run))


def test_compiled_kjnodes(host: ComfyServer, newest: Installation) -> None:
    """The drop-in's call is one operator: the compiler need not be kept from it."""
    need(packs.KJNODES)
    patched = kj("half")
    patched["inputs"]["allow_compile"] = True
    eager = latents(host, wan({"half": half("loader"), "kj": kj("half")}))
    chain = {"half": half("loader"), "kj": patched, "compiled": node("TorchCompileModel", "kj", backend="cudagraphs")}
    found, plain = latents(host, wan(chain)), latents(host, wan({"half": half("loader")}))
    assert (found - eager).norm() < 0.5 * (eager - plain).norm()
    stack = "KJNodes' with allow_compile, then TorchCompileModel"
    record(stack, hosts(newest, packs.KJNODES), compared(found, eager, plain), ["served by the drop-in"])


def test_skipped_layers_with_a_policy(host: ComfyServer, newest: Installation) -> None:
    """The guidance's pass skips a block and makes fewer calls than the others: cells stay with their blocks."""
    text = Path(__file__).with_name("tiny_wan_policy.json").read_text(encoding="utf-8")
    policy = {"class_type": "SageAttention2LoadPolicy", "inputs": {"text": text, "file": ""}}
    skip = {"double_layers": "0", "single_layers": "", "scale": 0.5, "start_percent": 0.0, "end_percent": 1.0}
    chain = {
        "policy": policy,
        "sage": sage("loader", policy=["policy", 0]),
        "slg": node("SkipLayerGuidanceDiT", "sage", **skip, rescaling_scale=0.0),
    }
    run, found = run_of(host, chain)
    plain = latents(host, wan({"slg": node("SkipLayerGuidanceDiT", "loader", **skip, rescaling_scale=0.0)}))
    assert not torch.equal(found, plain) and close(found, plain, 0.99)  # cells of the policy are 4b
    # Each of four steps lies in a column of its own. The calls of block 1 are made twice in a step.
    wanted: Counter[str] = Counter()
    for number, layer in enumerate(json.loads(text)["layers"]):
        for cell in layer["cells"][:STEPS]:
            wanted[cell["mode"] + " · smooth V" * cell["smooth_v"]] += 1 if number < 2 else 2
    served = re.findall(r"reference · (.*): (\d+) calls", "\n".join(counts(run)))
    assert dict(served) == {mode: str(count) for mode, count in wanted.items() if mode != "full"}
    record("the node with a policy, then SkipLayerGuidanceDiT", newest.name, "close to full precision", counts(run))


def test_sparse_attention_hands_its_dense_calls_back(host: ComfyServer, newest: Installation) -> None:
    """A stand-in for ComfyUI 0.36's *Model Sparse Attention*: dense for half of the steps, dense cross-attention."""
    run, found = run_of(
        host, {"sage": ours("loader"), "sparse": node("TestSparseAttention", "sage", start_percent=0.5)}
    )
    plain = latents(host, wan({"sparse": node("TestSparseAttention", "loader", start_percent=0.5)}))
    assert not torch.equal(found, plain) and close(found, plain)
    said = "\n".join(counts(run))  # two of four steps are sparse in their two self-attentions
    assert "12 of 16 attention calls served" in said, said
    record(
        "the node, then sparse attention (a stand-in for Model Sparse Attention)", newest.name,
        "close to full precision with it", counts(run),
    )  # fmt: skip
