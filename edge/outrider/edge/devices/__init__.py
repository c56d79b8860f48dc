"""Finds devices and decides where a draft runs."""
