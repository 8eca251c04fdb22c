"""PyTorch's names become shardd's in the whole process."""
