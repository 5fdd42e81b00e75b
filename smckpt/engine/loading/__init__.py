"""A load: choose, plan, read, give back."""
