"""Parallel degrees, the order of ranks, and the groups that follow from them.

The world is a grid of six dimensions. Innermost first, by default:

    tp    tensor parallel: the parts of one layer
    cp    context parallel: the parts of one sequence
    ep    expert parallel: the experts of one layer
    fsdp  the rest of the FSDP shard group, which is made of cp × fsdp ranks
    rep   hybrid sharding's replicas
    pp    pipeline stages

so that `world = pp × rep × shard_degree × ep × tp`, with `shard_degree = fsdp × cp`.

The meanings are those of SMP v2. `hybrid_shard_degree`: "SMP v2 core feature configuration
parameters" in the SageMaker developer guide (distributed-model-parallel-v2-reference). Expert
parallelism is a dimension beside the shard group, and context parallelism one inside it: SMP's
published scripts name one sharded checkpoint `tp{tp_rank}_ep{ep_rank}` per FSDP process group, so
ep_rank is the same in all of it, and AWS's training adapter for NeMo (its function
`validate_distributed_degrees`) demands that shard × tp × ep divide the world and that cp is at most
the shard degree. Combinations that SMP itself cannot run (ep with tp, any pp) work here too.
"""

from smckpt.topology.ranker import DEFAULT_ORDER, Ranker
from smckpt.topology.state import ParallelState

__all__ = ["DEFAULT_ORDER", "ParallelState", "Ranker"]
