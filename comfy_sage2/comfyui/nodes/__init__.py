"""What ComfyUI shows of the nodes, without torch: their inputs, and stand-ins if the library cannot be imported."""
