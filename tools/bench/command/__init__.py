"""What the command lines of the benchmarks share."""
