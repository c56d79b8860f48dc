"""Finds out why `outrider` does not work, or is slow, on this machine: `outrider doctor`."""
