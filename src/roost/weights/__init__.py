"""Weights from trainers to engines."""
