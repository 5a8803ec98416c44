"""Measurements behind `offload bench`."""
