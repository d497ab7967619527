"""The project's own tools: environments, ComfyUI servers, kernel builds, wheels and the shipped workflows."""
