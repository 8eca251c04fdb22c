"""What a process has by itself: environment variables, the compiled extension, memory that goes back to the system, progress."""
