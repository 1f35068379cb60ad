"""All tensor functions in plain torch: the reference that the faster kernels are tested against."""
