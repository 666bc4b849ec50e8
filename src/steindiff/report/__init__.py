"""Reports: one self-contained page, one picture, one file of numbers, of a comparison or of one's own pictures."""

from steindiff.images import contact_sheet
from steindiff.report.build import of_samplers, write
from steindiff.report.document import Entry, Report, of_images
from steindiff.report.page import page

__all__ = ["Entry", "Report", "contact_sheet", "of_images", "of_samplers", "page", "write"]
