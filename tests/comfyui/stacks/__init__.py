"""The node and the drop-in among other people's packs."""
