"""What is this process's own, whatever it trains: environment variables, the compiled extension, memory that goes back to the system, progress on a terminal."""
