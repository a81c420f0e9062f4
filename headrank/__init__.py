"""Measures how diverse the attention heads of a transformer are."""
