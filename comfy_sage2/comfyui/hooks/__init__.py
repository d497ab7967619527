"""The functions that ComfyUI calls: around a sampling, a pass and an attention call."""
