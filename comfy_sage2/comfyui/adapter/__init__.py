"""What ComfyUI hands over, read: an attention call, its layer, the packs around it and the memory that it lives in."""
