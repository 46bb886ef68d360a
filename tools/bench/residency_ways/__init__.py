"""What the residency benchmark plans, and what stands beside our search."""
