"""Convert a checkpoint to a GGUF file with 8-bit weights: python gguf_file.py IN.safetensors OUT.gguf. Needs gguf."""

from __future__ import annotations

import sys

import gguf
import numpy as np
from safetensors.numpy import load_file

MAX_DIMENSIONS = 4  # the format's limit; ComfyUI-GGUF reads the shape of a tensor with more from a field


def main(source: str, target: str) -> None:
    writer = gguf.GGUFWriter(target, "wan")
    for name, tensor in load_file(source).items():
        values = tensor.astype(np.float32)
        if values.ndim > MAX_DIMENSIONS:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(map(int, values.shape)))
            values = values.reshape(values.shape[0], -1)
            writer.add_tensor(name, values)
        elif values.ndim == 2 and values.shape[1] % 32 == 0 and name.startswith("blocks."):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
