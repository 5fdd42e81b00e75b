"""Keys that scripts import. Checkpoints of smckpt have none of them."""

SMP_IS_LOAD_INFO_KEY = "smp_is_load_info"
SMP_IS_PARTIAL_KEY = "smp_is_partial"
