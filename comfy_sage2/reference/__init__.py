"""The paper's algorithm, put together from `quantize/`; every choice is an option."""
