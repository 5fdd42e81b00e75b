"""Integrations with other libraries. The engine does not know them."""
