"""What the moves benchmark compares plans with."""
