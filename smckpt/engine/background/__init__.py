"""The process that writes, and the commands that it gets. No torch."""
