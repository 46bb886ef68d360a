"""The C interface: `stitch.h` and `libstitch.so`, which runs Stitch in an embedded Python.

`python -m stitch.c_interface build -o DIR` builds both from one table of functions.
"""
