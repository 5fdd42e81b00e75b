"""What a layout says: roles, the stored tensors that hold them, and the proof that all fit."""
