"""Many files as one model: ranks and stages that belong together, and catalogues of others."""
