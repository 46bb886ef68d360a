"""Executors: what each must do, drawn programs, and the table of their differences."""
