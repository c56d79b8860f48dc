"""The HTTP API. Knows an engine only through `outrider.cloud.seam`."""
