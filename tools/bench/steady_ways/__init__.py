"""The rows of `steady.py`: each file measures one thing that repeats, and gives its rows."""
