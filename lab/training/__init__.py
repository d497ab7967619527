"""Trainings of the small models that the demo and the evaluation use."""
