"""What the node serves in the model families that people run, built by ComfyUI's own classes with random weights."""
