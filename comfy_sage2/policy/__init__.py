"""Which mode each attention layer takes in each step: fixed, by shipped rules, or by a calibrated policy."""
