"""What a device did, as the folder that ttnn-visualizer opens.

Comes in: a device's events. Goes out: `db.sqlite` and `config.json`. Must not know: how they are
shown.
"""

from stitch.report.visualizer.visualizer_folder import VisualizerFolder

__all__ = ["VisualizerFolder"]
