"""A ComfyUI on this machine: find it, make its Python environment, start it."""
