// Spells the matrix vocabulary for AMD GPUs.
