"""The laboratory: demo, evaluation, baselines and measurements; the library never imports it."""
