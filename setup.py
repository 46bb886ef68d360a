"""What the wheel holds: the package, the machines' files, and the examples as `stitch/examples`."""

from pathlib import Path

from setuptools import find_packages, setup

EXAMPLES = [Path("examples"), *(p for p in sorted(Path("examples").iterdir()) if p.is_dir())]
folders = {"stitch." + ".".join(p.parts): str(p) for p in EXAMPLES if p.name != "__pycache__"}

setup(
    packages=[*find_packages(include=["stitch*"]), *folders],
    package_dir=folders,
    package_data={
        "stitch": ["py.typed"],
        "stitch.machine": ["*.yaml"],
        "stitch.report.page": ["page.*", "vendor/*"],
        "stitch.runtime.executors": ["price_tables/*.yaml"],
        "stitch.ttb.ttnn": ["*.json"],
        **{name: ["*.md", "*.yaml", "*.npz"] for name in folders},
    },
)
