"""Makes one model, a pair or a sweep: from a source to bundles on disk."""
