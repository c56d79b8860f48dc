"""The exporter: models in, checked bundles out."""
