"""A client of the verifier: for the device, and for a cascade."""
