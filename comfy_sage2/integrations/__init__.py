"""SageAttention2 inside other libraries."""
