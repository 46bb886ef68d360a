"""Documents: files that say what to run, a pipeline or a training.

Comes in: paths of YAML files. Goes out: frozen descriptions of what they say, checked; a pipeline
that can be called, the data of a training. Must not know: commands.
"""
