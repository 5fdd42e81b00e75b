"""A checkpoint in another format: `convert`."""
