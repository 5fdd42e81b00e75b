"""The files of a checkpoint, byte for byte: names, headers, checksums, manifests, rows, values."""
