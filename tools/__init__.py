"""Developer tools: kernel builds and wheels, ComfyUI servers, Pythons of other platforms, figures of the docs."""
