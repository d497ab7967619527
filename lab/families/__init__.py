"""The model families that people run, built by ComfyUI's own classes with random weights: what the node serves."""
