"""IR to kernels, cubins, launches and the Plan."""
