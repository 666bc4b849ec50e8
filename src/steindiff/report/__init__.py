"""The report of a comparison: one self-contained page, one picture, one file of numbers."""

from steindiff.report.build import write
from steindiff.report.page import page
from steindiff.report.picture import contact_sheet

__all__ = ["contact_sheet", "page", "write"]
