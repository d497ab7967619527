"""ComfyUI's side of the pack; nothing else in comfy_sage2 knows ComfyUI."""
