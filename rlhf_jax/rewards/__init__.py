"""Rewards: models and JAX functions on the device, Python functions and servers on the host."""
