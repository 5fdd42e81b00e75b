"""As in `torch.sagemaker`."""
