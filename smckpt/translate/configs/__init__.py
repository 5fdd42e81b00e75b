"""A model's config: its keys in each version, and what a trainer's arguments say of it."""
