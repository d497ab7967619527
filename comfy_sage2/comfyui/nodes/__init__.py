"""What ComfyUI shows of the nodes, without torch: their inputs, and the nodes of a library that cannot be imported."""
