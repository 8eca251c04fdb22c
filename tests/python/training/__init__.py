"""Whole runs: beside PyTorch, and after deaths."""
