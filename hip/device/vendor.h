// Spells the kernel vocabulary for AMD GPUs.
