"""What the node costs in a model: seconds a sampling step, the guard, a calibration."""
