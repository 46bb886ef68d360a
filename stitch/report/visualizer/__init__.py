"""What a device did, as the folder that ttnn-visualizer opens."""

from stitch.report.visualizer.visualizer_folder import VisualizerFolder

__all__ = ["VisualizerFolder"]
