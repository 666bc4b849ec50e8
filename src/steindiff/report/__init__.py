"""Reports: one self-contained page, one picture, one file of numbers, of a comparison or of one's own pictures."""

from steindiff.report.document import Entry, Report, contact_sheet, of_images, of_samplers
from steindiff.report.page import page, write

__all__ = ["Entry", "Report", "contact_sheet", "of_images", "of_samplers", "page", "write"]
