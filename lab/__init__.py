"""The laboratory: demo, evaluation, baselines, measurements and trainings. The library never imports it."""
