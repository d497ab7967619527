"""Nodes that leave every call to ComfyUI's attention and look at it: calibration and capture."""
