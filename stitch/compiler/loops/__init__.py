"""Loop schedules: how the scans of a graph run, by their estimated cost on a machine."""
