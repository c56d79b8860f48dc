"""Model runtimes behind two seams: `BatchRuntime` for the cloud's engine, `SequenceRuntime` for the device's draft."""
