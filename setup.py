"""What the wheel holds: the package, the files of machines and schemas, and the examples as
`stitch/examples`."""

from setuptools import find_namespace_packages, setup

HIDDEN = ("*__pycache__*", "*.egg-info*", "*.build*")
EXAMPLES = ["examples", *find_namespace_packages(include=["examples.*"], exclude=HIDDEN)]
folders = {f"stitch.{name}": name.replace(".", "/") for name in EXAMPLES}
folders["stitch.schema"] = "schema"

setup(
    # Folders of data are packages as well, so that no tool leaves them out.
    packages=[
        *find_namespace_packages(include=["stitch", "stitch.*"], exclude=HIDDEN),
        *folders,
    ],
    package_dir=folders,
    include_package_data=False,
    package_data={
        "stitch": ["py.typed"],
        "stitch.machine": ["*.yaml"],
        "stitch.report.page": ["page.*"],
        "stitch.report.page.vendor": ["*"],
        "stitch.runtime.executors.price_tables": ["*.yaml"],
        "stitch.schema": ["*.fbs"],
        "stitch.schemas": ["*.json"],
        "stitch.ttb.ttnn": ["*.json"],
        **{
            name: ["*.md", "*.yaml", "*.npz", "*.toml", "*.c", "*.cpp"]
            for name in folders
            if name.startswith("stitch.examples")
        },
    },
)
