"""The laboratory: demo, evaluation, baselines and trainings. It uses the library; the library never uses it."""
