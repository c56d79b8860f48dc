"""Reads the configuration of `outrider`, and installs its service. Knows no command: it is given their options."""
