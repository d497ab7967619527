"""The node and the drop-in among other people's packs and ComfyUI's own patches; what happened goes into a page."""
