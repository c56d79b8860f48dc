"""The verdict on an export: report card, comparison and HTML page."""
