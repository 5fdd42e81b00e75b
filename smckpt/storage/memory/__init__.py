"""Steps in the memory of hosts: one keeper process a host, and the store `keeper://JOB/…`."""
