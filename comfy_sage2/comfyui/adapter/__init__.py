"""What ComfyUI hands over, read: a call, the options of its pass, the packs around it and its memory."""
