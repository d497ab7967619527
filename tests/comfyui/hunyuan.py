"""Tensor names and shapes that ComfyUI detects as HunyuanVideo."""

from __future__ import annotations

from tiny_wan import HEAD_DIM, Shapes


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def hunyuan_shapes(width: int = 2 * HEAD_DIM, text_width: int = 64) -> Shapes:
    """HunyuanVideo 1.0, one double and one single block; attention with skip_reshape, and a mask for padded text."""
    feed_forward = 4 * width
    shapes: Shapes = {"img_in.proj.weight": (width, 16, 1, 2, 2), "img_in.proj.bias": (width,)}
    for name, outputs, inputs in (
        ("time_in.in_layer", width, 256),
        ("time_in.out_layer", width, width),
        ("vector_in.in_layer", width, 768),
        ("vector_in.out_layer", width, width),
        ("txt_in.input_embedder", width, text_width),
        ("txt_in.t_embedder.in_layer", width, 256),
        ("txt_in.t_embedder.out_layer", width, width),
        ("txt_in.c_embedder.in_layer", width, text_width),
        ("txt_in.c_embedder.out_layer", width, width),
        ("final_layer.linear", 16 * 4, width),
        ("final_layer.adaLN_modulation.1", 2 * width, width),
        ("single_blocks.0.linear1", 3 * width + feed_forward, width),
        ("single_blocks.0.linear2", width, width + feed_forward),
        ("single_blocks.0.modulation.lin", 3 * width, width),
    ):
        shapes |= _linear(name, outputs, inputs)
    shapes |= {f"single_blocks.0.norm.{name}_norm.scale": (HEAD_DIM,) for name in ("query", "key")}
    for index in range(2):
        block = f"txt_in.individual_token_refiner.blocks.{index}"
        shapes |= _linear(f"{block}.adaLN_modulation.1", 2 * width, width)
        shapes |= {f"{block}.{norm}.{part}": (width,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
        shapes |= _linear(f"{block}.self_attn.qkv", 3 * width, width) | _linear(f"{block}.self_attn.proj", width, width)
        shapes |= _linear(f"{block}.mlp.0", feed_forward, width) | _linear(f"{block}.mlp.2", width, feed_forward)
    for stream in ("img", "txt"):
        block = f"double_blocks.0.{stream}"
        shapes |= _linear(f"{block}_mod.lin", 6 * width, width)
        shapes |= _linear(f"{block}_attn.qkv", 3 * width, width) | _linear(f"{block}_attn.proj", width, width)
        shapes |= {f"{block}_attn.norm.{name}_norm.scale": (HEAD_DIM,) for name in ("query", "key")}
        shapes |= _linear(f"{block}_mlp.0", feed_forward, width) | _linear(f"{block}_mlp.2", width, feed_forward)
    return shapes
