"""Training scripts as people write them, and the table of them."""
