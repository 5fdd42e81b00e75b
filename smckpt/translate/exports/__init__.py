"""What `export_hf`, `import_hf` and `verify_hf` carry out."""
