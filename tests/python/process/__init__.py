"""What a process has by itself."""
