"""Trains, evaluates and describes the bundled reference pair. Run by hand: `train`, then `evaluate`."""
