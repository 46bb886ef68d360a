"""What the packing benchmark reads, and what stands beside our search."""
