"""Optimizers' state: whose it is, under which names, and how it comes back."""
