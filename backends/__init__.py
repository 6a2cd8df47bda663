"""Floor 2: what computes attention on one device, and may it? Only `backends.kernels` imports torch."""
