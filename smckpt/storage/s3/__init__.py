"""Checkpoints in S3. The store is `storage.S3Storage`, its options are `config.StoreOptions`."""
