"""What changed in a model, for servers that follow it."""
