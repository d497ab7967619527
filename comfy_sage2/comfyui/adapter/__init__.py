"""Readers of what ComfyUI passes in: attention calls, options of a pass, other packs' functions, device memory."""
