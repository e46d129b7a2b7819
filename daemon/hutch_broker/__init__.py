"""The model-traffic proxy: leases come in, real keys go out, to the provider and nowhere else."""
