"""PyTorch's names replaced."""
