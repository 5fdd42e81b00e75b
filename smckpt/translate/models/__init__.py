"""Which tensors of a source are the model, under which names: adapters, quantized and compared."""
