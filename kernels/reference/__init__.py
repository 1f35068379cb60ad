"""Every tensor function in plain torch: the truth that the faster kernels are tested against."""
