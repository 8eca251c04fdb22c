"""Fully sharded modules: what is shown and computed."""
