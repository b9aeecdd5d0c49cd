"""Device arrays."""
