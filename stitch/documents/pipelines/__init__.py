"""Pipeline files: separately compiled binaries, and how data flows through them.

Comes in: the path of a YAML file, binaries, a device. Goes out: a `YamlPipeline`, or every defect
with its line. Must not know: commands.
"""
