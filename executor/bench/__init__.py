"""Measurements of the executor by itself: what a round costs beside the models, what speculation gains."""
