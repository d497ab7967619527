"""Trains the demo model: VAE, diffusion model, and the classifier that judges its captions."""
