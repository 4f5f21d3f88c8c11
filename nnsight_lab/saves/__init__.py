"""Saved values after they left the model."""
