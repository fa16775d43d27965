"""lc1: a backend that is as strict as NCCL, for machines without a GPU."""
