"""The process that runs a request's function, and how the request gets there."""
