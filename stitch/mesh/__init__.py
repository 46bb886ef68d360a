"""Several devices used as one: machine specifications, placement, schedules, simulated time."""
