"""All tests: a folder for each room, and `support`, what several of them share."""
