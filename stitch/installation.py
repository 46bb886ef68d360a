"""Find out whether the other distribution that installs a package `stitch` is installed as well.

The distribution `stitch` on the package index is a tool for Android apps. Its files and those of
`stitch-runtime` lie in one folder, where each overwrites the `__init__.py` of the other.
"""

from __future__ import annotations

import os


def check_installation() -> None:
    """Raise `ImportError` if the folder of this package is shared with the other distribution."""
    # Strings: pathlib would take a third of the time of `stitch --version`.
    package = __file__.rpartition(os.sep)[0]
    folder = package.rpartition(os.sep)[0]
    try:
        with os.scandir(folder) as entries:
            # Hyphens within a distribution's name are underscores here.
            found = [entry.name for entry in entries if entry.name.startswith("stitch-")]
    except OSError:  # The package is in an archive, or the folder cannot be listed.
        return
    found = [name for name in found if name.endswith((".dist-info", ".egg-info"))]
    if found:
        version = found[0].removeprefix("stitch-").rpartition(".")[0]
        raise ImportError(
            f"the distribution 'stitch' {version}, a tool for Android apps, is installed into the "
            "folder of Stitch ('stitch-runtime'), and each overwrites files of the other\n"
            f"  where: {package}\n"
            "  try: pip uninstall stitch stitch-runtime; pip install stitch-runtime, or install "
            "the two into different environments"
        )
