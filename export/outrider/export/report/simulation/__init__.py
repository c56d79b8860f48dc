"""What a draft's measured ranks promise: how fast it would be behind each round trip, by simulation."""
