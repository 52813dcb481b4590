"""isotype's Triton kernels for GPUs; all other products there are torch's or bitsandbytes'."""
