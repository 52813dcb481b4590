"""isotype's Triton kernels for GPUs. Matrix products on GPUs are torch's or bitsandbytes'."""
