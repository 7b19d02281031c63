"""Capture rules as values: what a configuration needs, how they are written and read back."""
