"""The attention call of ComfyUI: its arguments, the override, and its way through torch.compile."""
