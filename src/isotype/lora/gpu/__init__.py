"""isotype's Triton kernels for GPUs. torch and bitsandbytes compute the matrix products on GPUs."""
