"""What isotype computes on GPUs by kernels of its own, in Triton; every other product there is torch's or bitsandbytes'."""
