"""The machine around the library: its GPU, its files, its terminal."""
