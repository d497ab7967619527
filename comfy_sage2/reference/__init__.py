"""The paper's algorithm put together from `quantize/`, with every choice an option."""
