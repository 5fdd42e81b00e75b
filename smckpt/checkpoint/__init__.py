"""What a checkpoint is on disk: format, commit, catalogue, read plan, verification. No torch."""
