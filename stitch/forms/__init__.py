"""Forms that people write and files of arrays: read with line numbers, all defects at once.

Comes in: text that may be hostile, paths of array files. Goes out: values of the right type,
arrays, or what is wrong with which line. Must not know: what a form is for.
"""
