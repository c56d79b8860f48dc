"""Judges an export: report card, comparison and HTML page."""
