"""The report page: a run as one self-contained HTML file."""

from stitch.report.page.device_page import device_page
from stitch.report.page.page_data import page_data
from stitch.report.page.page_writer import PageExtras, page_text

__all__ = ["PageExtras", "device_page", "page_data", "page_text"]
