"""The life of a registered model."""
