"""Programs of several processes for the tests of sequence parallelism, on the CPU (gloo) and on GPUs (NCCL)."""
